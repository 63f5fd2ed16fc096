"""Finding documents: metrics of a score matrix, and the word-based answer to compare with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from regauge.tasks import Sums

RECALL_AT = (1, 10)
WORD = re.compile(r"\w+")
K1, B = 1.5, 0.75
"""Saturation of a word's count, and share of the length that is normalised (Robertson, 1994)."""
FUSION_CONSTANT = 60
"""Added to ranks in reciprocal-rank fusion (Cormack et al., 2009)."""


def ranks(scores: Tensor) -> Tensor:
    """Return the rank of each query's own document, [queries]; ties share their mean rank.

    Scores are [queries, documents]; the own document of query i is document i.
    """
    right = scores.diagonal()[:, None]
    tied = (scores == right).sum(1) - 1
    return 1 + (scores > right).sum(1) + tied / 2


def tally(scores: Tensor, real: Tensor) -> Sums:
    """Return recall and mean reciprocal rank as (sum, weight)."""
    found = ranks(scores)
    weight = real.sum()
    recalls = {f"recall@{k}": (((found <= k) * real).sum(), weight) for k in RECALL_AT}
    return {**recalls, "mrr": ((real / found).sum(), weight)}


def bm25(queries: Sequence[str], documents: Sequence[str]) -> Tensor:
    """Return BM25 scores, [queries, documents], over the lower-case words of whole texts."""
    import bm25s
    import numpy as np
    import torch

    index = bm25s.BM25(k1=K1, b=B)
    index.index([_words(text) for text in documents], show_progress=False)
    nothing = np.zeros(len(documents), np.float32)
    asked = [[word for word in _words(text) if word in index.vocab_dict] for text in queries]
    return torch.from_numpy(
        np.stack([index.get_scores(words) if words else nothing for words in asked])
    )


def fused(first: Tensor, second: Tensor) -> Tensor:
    """Return the reciprocal-rank fusion of two score matrices."""
    return _reciprocal(first) + _reciprocal(second)


def _reciprocal(scores: Tensor) -> Tensor:
    places = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return 1 / (FUSION_CONSTANT + 1 + places)


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())
