"""Finding documents: metrics of a score matrix, and the word-based answer to compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.data.lexical import split_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from regauge.tasks import Sums

RECALL_AT = (1, 10)
QUERIES = 1024
K1, B = 1.5, 0.75
"""Saturation of a word's count, and share of the length that is normalised (Robertson, 1994)."""
FUSION_CONSTANT = 60
"""Added to ranks in reciprocal-rank fusion (Cormack et al., 2009)."""


def parts(count: int) -> Iterator[slice]:
    """Yield slices of queries whose scores are computed at a time, to bound the memory."""
    for start in range(0, count, QUERIES):
        yield slice(start, min(start + QUERIES, count))


def ranks(scores: Tensor, first: int, real: Tensor) -> Tensor:
    """Return the rank of each query's own document, [queries]; ties share their mean rank.

    Scores are [queries, documents]; the own document of query i is document `first` + i. Documents
    whose `real` is 0 are not there.
    """
    right = scores.diagonal(first)[:, None]
    better = ((scores > right) * real).sum(1)
    tied = ((scores == right) * real).sum(1) - 1
    return 1 + better + tied / 2


def tally(ranks: Sequence[Tensor], real: Tensor) -> Sums:
    """Return recall and mean reciprocal rank as (sum, weight), of the ranks of all parts."""
    import torch

    found = torch.cat(list(ranks))
    weight = real.sum()
    recalls = {f"recall@{k}": (((found <= k) * real).sum(), weight) for k in RECALL_AT}
    return {**recalls, "mrr": ((real / found).sum(), weight)}


class Words:
    """BM25 over the lower-case words of whole documents."""

    def __init__(self, documents: Sequence[str]) -> None:
        import bm25s

        self._index = bm25s.BM25(k1=K1, b=B)
        self._index.index([split_words(text) for text in documents], show_progress=False)
        self._documents = len(documents)

    def scores(self, queries: Sequence[str]) -> Tensor:
        """Return the score of every document for every query, [queries, documents]."""
        import numpy as np
        import torch

        found = np.zeros((len(queries), self._documents), np.float32)
        for row, text in zip(found, queries, strict=True):
            words = [word for word in split_words(text) if word in self._index.vocab_dict]
            if words:
                row[:] = self._index.get_scores(words)
        return torch.from_numpy(found)

    def within(self, query: str, places: Sequence[int]) -> Tensor:
        """Return the scores of some documents for one query."""
        return self.scores([query])[0, list(places)]


def fused(first: Tensor, second: Tensor) -> Tensor:
    """Return the reciprocal-rank fusion of two score matrices."""
    return _reciprocal(first) + _reciprocal(second)


def _reciprocal(scores: Tensor) -> Tensor:
    places = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return 1 / (FUSION_CONSTANT + 1 + places)
