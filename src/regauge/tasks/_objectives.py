"""Ranking losses; each returns weighted losses and their weights.

Scores, labels and `present` are [rows, candidates]; `present` is 0 for padding candidates. A row
without a usable label has weight 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, log_softmax, softplus

WeightedLosses = tuple[Tensor, Tensor]
RankingLoss = Callable[[Tensor, Tensor, Tensor], WeightedLosses]


def pointwise(scores: Tensor, labels: Tensor, present: Tensor) -> WeightedLosses:
    """Return the binary cross-entropy of each candidate's relevance, [rows, candidates]."""
    relevant = (labels > 0).to(scores.dtype)
    losses = binary_cross_entropy_with_logits(scores, relevant, reduction="none")
    return losses * present, present


def pairwise(scores: Tensor, labels: Tensor, present: Tensor) -> WeightedLosses:
    """Return the mean logistic loss over candidate pairs with unequal labels, [rows].

    This is RankNet (Burges et al., 2005).
    """
    better = (labels[:, :, None] > labels[:, None, :]).to(scores.dtype)
    pairs = better * present[:, :, None] * present[:, None, :]
    losses = softplus(scores[:, None, :] - scores[:, :, None]) * pairs
    count = pairs.sum((1, 2))
    return losses.sum((1, 2)) / count.clamp(min=1.0), (count > 0).to(scores.dtype)


def listwise(scores: Tensor, labels: Tensor, present: Tensor) -> WeightedLosses:
    """Return the cross-entropy between normalized labels and softmax scores, [rows].

    This is ListNet (Cao et al., 2007).
    """
    relevance = labels * present
    total = relevance.sum(1, keepdim=True)
    lowest = torch.finfo(scores.dtype).min
    log_probabilities = log_softmax(scores.masked_fill(present == 0, lowest), 1)
    log_probabilities = log_probabilities.masked_fill(present == 0, 0.0)
    losses = -(relevance / total.clamp(min=1e-9) * log_probabilities).sum(1)
    return losses, (total[:, 0] > 0).to(scores.dtype)
