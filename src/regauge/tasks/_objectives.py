"""What a ranking is trained for; each returns weighted losses, and their weights.

Scores, labels and `present` are [rows, candidates]. A row with nothing to learn has weight 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, log_softmax, softplus

Weighted = tuple[Tensor, Tensor]
Objective = Callable[[Tensor, Tensor, Tensor], Weighted]


def pointwise(scores: Tensor, labels: Tensor, present: Tensor) -> Weighted:
    """Return the cross-entropy of each candidate's being relevant, [rows, candidates]."""
    relevant = (labels > 0).to(scores.dtype)
    losses = binary_cross_entropy_with_logits(scores, relevant, reduction="none")
    return losses * present, present


def pairwise(scores: Tensor, labels: Tensor, present: Tensor) -> Weighted:
    """Return the mean logistic loss of a row's pairs of unlike labels, [rows] (RankNet, 2005)."""
    better = (labels[:, :, None] > labels[:, None, :]).to(scores.dtype)
    pairs = better * present[:, :, None] * present[:, None, :]
    losses = softplus(scores[:, None, :] - scores[:, :, None]) * pairs
    count = pairs.sum((1, 2))
    return losses.sum((1, 2)) / count.clamp(min=1.0), (count > 0).to(scores.dtype)


def listwise(scores: Tensor, labels: Tensor, present: Tensor) -> Weighted:
    """Return the cross-entropy of each row's softmax and its labels' shares (ListNet, 2007)."""
    shares = labels * present
    total = shares.sum(1, keepdim=True)
    lowest = torch.finfo(scores.dtype).min
    told = log_softmax(scores.masked_fill(present == 0, lowest), 1)
    losses = -(shares / total.clamp(min=1e-9) * told.masked_fill(present == 0, 0.0)).sum(1)
    return losses, (total[:, 0] > 0).to(scores.dtype)
