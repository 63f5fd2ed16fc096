"""Retrieval metrics of score matrices, and the BM25 baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.data.lexical import split_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from regauge.tasks import MetricSums

RECALL_AT = (1, 10)
QUERIES_PER_SLICE = 1024
"""Queries that are scored at a time, which bounds the memory of a score matrix."""
K1, B = 1.5, 0.75
"""BM25's term-frequency saturation and length normalization (Robertson et al., 1994)."""
FUSION_CONSTANT = 60
"""Added to ranks in reciprocal rank fusion (Cormack et al., 2009)."""


def query_slices(count: int) -> Iterator[slice]:
    """Yield slices of at most QUERIES_PER_SLICE queries."""
    for start in range(0, count, QUERIES_PER_SLICE):
        yield slice(start, min(start + QUERIES_PER_SLICE, count))


def find_equal(hashes: Tensor, rows: slice) -> Tensor:
    """Return which texts are equal to those of some rows, [..., rows, texts].

    Hashes are [..., texts, words].
    """
    selected = hashes[..., rows, :]
    equal = selected[..., :, None, 0] == hashes[..., None, :, 0]
    for word in range(1, hashes.shape[-1]):
        equal &= selected[..., :, None, word] == hashes[..., None, :, word]
    return equal


class PairedCorpus:
    """The documents of (query, document) pairs, of which equal ones count once.

    A document is relevant to a query if it is the document of one of the pairs with this query.
    """

    def __init__(self, query_hashes: Tensor, document_hashes: Tensor, real: Tensor) -> None:
        """Index pairs; hashes are [pairs, words], and `real`, [pairs], is 0 for padding."""
        import torch

        self._query_hashes = query_hashes
        self._real = real > 0
        self._first = _find_first(document_hashes)
        indices = torch.arange(len(real), device=real.device)
        self.is_document = self._real & (self._first == indices)
        """Whether a pair is the first one with its document, [pairs]."""

    def rank(self, scores: Tensor, queries: slice) -> Tensor:
        """Return the rank of each query's document, [queries]; ties share their mean rank.

        Scores are those of some queries for the documents of all pairs, [queries, pairs]. The other
        relevant documents of a query do not count.
        """
        import torch

        same_query = find_equal(self._query_hashes, queries) & self._real
        relevant = torch.zeros_like(scores).index_add_(1, self._first, same_query.to(scores.dtype))
        counted = self.is_document & (relevant == 0)
        target = scores.gather(1, self._first[queries, None])
        better = ((scores > target) & counted).sum(1)
        tied = ((scores == target) & counted).sum(1)
        return 1 + better + tied / 2


def _find_first(hashes: Tensor) -> Tensor:
    """Return the index of the first text that is equal to each text, [texts]."""
    import torch

    indices = torch.arange(len(hashes), device=hashes.device)
    return torch.cat(
        [
            torch.where(find_equal(hashes, part), indices, len(hashes)).amin(1)
            for part in query_slices(len(hashes))
        ]
    )


def retrieval_metrics(ranks: Sequence[Tensor], real: Tensor) -> MetricSums:
    """Return the sums of recall and mean reciprocal rank over the ranks of all slices."""
    import torch

    all_ranks = torch.cat(list(ranks))
    weight = real.sum()
    recalls = {f"recall@{k}": (((all_ranks <= k) * real).sum(), weight) for k in RECALL_AT}
    return {**recalls, "mrr": ((real / all_ranks).sum(), weight)}


class Bm25Index:
    """BM25 over the lower-case words of whole documents."""

    def __init__(self, documents: Sequence[str]) -> None:
        import bm25s

        self._index = bm25s.BM25(k1=K1, b=B)
        self._index.index([split_words(text) for text in documents], show_progress=False)
        self._num_documents = len(documents)

    def score(self, queries: Sequence[str]) -> Tensor:
        """Return the score of every document for every query, [queries, documents]."""
        import numpy as np
        import torch

        scores = np.zeros((len(queries), self._num_documents), np.float32)
        for row, text in zip(scores, queries, strict=True):
            words = [word for word in split_words(text) if word in self._index.vocab_dict]
            if words:
                row[:] = self._index.get_scores(words)
        return torch.from_numpy(scores)

    def score_documents(self, query: str, indices: Sequence[int]) -> Tensor:
        """Return the scores of selected documents for one query, [indices]."""
        return self.score([query])[0, list(indices)]


def fuse_scores(left: Tensor, right: Tensor, is_document: Tensor) -> Tensor:
    """Return the reciprocal rank fusion of two score matrices, [queries, documents].

    `is_document`, [documents], is false for columns that are ranked last.
    """
    first, second = (
        _reciprocal_ranks(scores.masked_fill(~is_document, float("-inf")))
        for scores in (left, right)
    )
    return first + second


def _reciprocal_ranks(scores: Tensor) -> Tensor:
    ranks = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return 1 / (FUSION_CONSTANT + 1 + ranks)
