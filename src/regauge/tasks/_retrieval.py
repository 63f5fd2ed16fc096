"""Retrieval metrics for score matrices, and the BM25 baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.data.lexical import split_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from regauge.tasks import MetricSums

RECALL_AT = (1, 10)
QUERIES_PER_SLICE = 1024
"""Queries scored at a time, to bound the memory of a score matrix."""
K1, B = 1.5, 0.75
"""BM25's term-frequency saturation and length normalization (Robertson et al., 1994)."""
FUSION_CONSTANT = 60
"""Added to ranks in reciprocal rank fusion (Cormack et al., 2009)."""


def query_slices(count: int) -> Iterator[slice]:
    for start in range(0, count, QUERIES_PER_SLICE):
        yield slice(start, min(start + QUERIES_PER_SLICE, count))


def find_equal(hashes: Tensor, rows: slice) -> Tensor:
    """Return which texts equal the texts in some rows, [..., rows, texts].

    Hashes are [..., texts, words].
    """
    return find_matches(hashes[..., rows, :], hashes)


def find_matches(hashes: Tensor, others: Tensor) -> Tensor:
    """Return which texts equal other texts, [..., texts, others]; hashes end with words."""
    equal = hashes[..., :, None, 0] == others[..., None, :, 0]
    for word in range(1, hashes.shape[-1]):
        equal &= hashes[..., :, None, word] == others[..., None, :, word]
    return equal


class PairedCorpus:
    """Query documents and further texts; equal texts count once.

    A document is relevant to a query if it is a document in one of the rows with this query.
    """

    def __init__(
        self,
        query_hashes: Tensor,  # [rows, words]
        text_hashes: Tensor,  # [texts, words]
        real: Tensor,  # [rows]
        num_documents: int = 1,
    ) -> None:
        """Index texts: first document number 0 in all rows, then number 1, and so on.

        A row's texts after its `num_documents` documents are not relevant to any query. `real` is 0
        for padding rows.
        """
        import torch

        self._num_rows = len(real)
        self._num_documents = num_documents
        self._query_hashes = query_hashes
        self._real = real > 0
        self._first = _find_first(text_hashes)
        indices = torch.arange(len(text_hashes), device=real.device)
        is_real = self._real.repeat(len(text_hashes) // len(real))
        self.is_document = is_real & (self._first == indices)
        """Whether a text is the first among its equals, [texts]."""

    def rank(self, scores: Tensor, queries: slice, document: int = 0) -> Tensor:
        """Rank one document per query, [queries]; ties share their mean rank.

        Scores are those of some queries for all texts, [queries, texts]. The query's other relevant
        documents do not count. `document` is the document's number in its row.
        """
        import torch

        same_query = (find_equal(self._query_hashes, queries) & self._real).to(scores.dtype)
        documents = self._first[: self._num_documents * self._num_rows]
        relevant = torch.zeros_like(scores).index_add_(
            1, documents, same_query.repeat(1, self._num_documents)
        )
        counted = self.is_document & (relevant == 0)
        rows = self._first.unflatten(0, (-1, self._num_rows))[document]
        target = scores.gather(1, rows[queries, None])
        better = ((scores > target) & counted).sum(1)
        tied = ((scores == target) & counted).sum(1)
        return 1 + better + tied / 2

    def rank_documents(self, scores: Tensor, queries: slice) -> Tensor:
        """Rank every document for some queries, [documents, queries]."""
        import torch

        numbers = range(self._num_documents)
        return torch.stack([self.rank(scores, queries, number) for number in numbers])


def _find_first(hashes: Tensor) -> Tensor:
    """Return the index of the first text equal to each text, [texts]."""
    import torch

    indices = torch.arange(len(hashes), device=hashes.device)
    return torch.cat(
        [
            torch.where(find_equal(hashes, part), indices, len(hashes)).amin(1)
            for part in query_slices(len(hashes))
        ]
    )


def retrieval_metrics(ranks: Sequence[Tensor], real: Tensor) -> MetricSums:
    """Sum recall and reciprocal rank over the ranks in all slices.

    Ranks are [documents, queries], or [queries] for one document; a query counts with the mean over
    its documents.
    """
    import torch

    all_ranks = torch.atleast_2d(torch.cat(list(ranks), -1))
    weight = real.sum()

    def sum_means(values: Tensor) -> Tensor:
        return (values.to(real.dtype).mean(0) * real).sum()

    recalls = {f"recall@{k}": (sum_means(all_ranks <= k), weight) for k in RECALL_AT}
    return {**recalls, "mrr": (sum_means(1 / all_ranks), weight)}


class Bm25Index:
    """BM25 over lower-case words in whole documents."""

    def __init__(self, documents: Sequence[str]) -> None:
        import bm25s

        self._index = bm25s.BM25(k1=K1, b=B)
        self._index.index([split_words(text) for text in documents], show_progress=False)
        self._num_documents = len(documents)

    def score(self, queries: Sequence[str]) -> Tensor:
        """Score every document for every query, [queries, documents]."""
        import numpy as np
        import torch

        scores = np.zeros((len(queries), self._num_documents), np.float32)
        for row, text in zip(scores, queries, strict=True):
            words = [word for word in split_words(text) if word in self._index.vocab_dict]
            if words:
                row[:] = self._index.get_scores(words)
        return torch.from_numpy(scores)


def fuse_scores(left: Tensor, right: Tensor, is_document: Tensor) -> Tensor:
    """Fuse two score matrices by reciprocal rank, [queries, documents].

    `is_document`, [documents], is false for columns ranked last.
    """
    first, second = (
        _reciprocal_ranks(scores.masked_fill(~is_document, float("-inf")))
        for scores in (left, right)
    )
    return first + second


def _reciprocal_ranks(scores: Tensor) -> Tensor:
    ranks = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return 1 / (FUSION_CONSTANT + 1 + ranks)
