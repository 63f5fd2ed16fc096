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


def document_ranks(scores: Tensor, offset: int, real: Tensor) -> Tensor:
    """Return the rank of each query's document, [queries]; ties share their mean rank.

    Scores are [queries, documents]; the document of query i is document `offset` + i. `real`,
    [documents], is 0 for padding.
    """
    target = scores.diagonal(offset)[:, None]
    better = ((scores > target) * real).sum(1)
    tied = ((scores == target) * real).sum(1) - 1
    return 1 + better + tied / 2


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


def fuse_scores(left: Tensor, right: Tensor) -> Tensor:
    """Return the reciprocal rank fusion of two score matrices, [queries, documents]."""
    return _reciprocal_ranks(left) + _reciprocal_ranks(right)


def _reciprocal_ranks(scores: Tensor) -> Tensor:
    ranks = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return 1 / (FUSION_CONSTANT + 1 + ranks)
