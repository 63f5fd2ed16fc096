"""How well classes, values and orders are told: metrics as (sum, weight) of the whole split.

Each is a quotient whose parts are returned, so that an empty split divides nothing by nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Quotient = tuple["Tensor", "Tensor"]


@dataclass(frozen=True)
class Counts:
    """What was told and what is so, by class, [classes] float64."""

    hits: Tensor
    told: Tensor
    true: Tensor

    @classmethod
    def of(cls, told: Tensor, labels: Tensor, real: Tensor, classes: int) -> Counts:
        """Count classes, both [rows] int64; rows whose `real` is 0 are not there."""
        import torch

        weight = real.to(torch.float64)

        def count(kinds: Tensor, amount: Tensor) -> Tensor:
            return torch.zeros(classes, dtype=torch.float64).index_add_(0, kinds, amount)

        hits = weight * (told == labels)
        return cls(count(labels, hits), count(told, weight), count(labels, weight))

    def accuracy(self) -> Quotient:
        """Return the share of rows that are told right."""
        return self.hits.sum(), self.true.sum()

    def f1(self) -> Quotient:
        """Return the F1 of class 1 where there are two, else the mean over the classes that occur.

        F1 is 2 TP / (2 TP + FP + FN) (van Rijsbergen, 1979).
        """
        both = self.told + self.true
        if len(both) == 2:  # noqa: PLR2004 - GLUE's tasks of two classes ask for that of the second
            return 2 * self.hits[1], both[1]
        occurs = both > 0
        return (2 * self.hits[occurs] / both[occurs]).sum(), occurs.sum()

    def matthews(self) -> Quotient:
        """Return Matthews' correlation, for any number of classes (Gorodkin, 2004, R_K)."""
        rows = self.true.sum()
        top = self.hits.sum() * rows - (self.told * self.true).sum()
        spreads = [rows.square() - counts.square().sum() for counts in (self.told, self.true)]
        return top, (spreads[0] * spreads[1]).sqrt()


def ndcg(scores: Tensor, labels: Tensor, present: Tensor, at: int) -> Quotient:
    """Return the sum of NDCG over the rows with a relevant candidate, and how many there are.

    Gains are 2^label - 1, discounts log2 (Burges et al., 2005); scores, labels and `present` are
    [rows, candidates]. Of equal scores the less relevant one comes first.
    """
    import torch

    gains = torch.where(present > 0, torch.exp2(labels.double()) - 1, 0.0)
    discounts = torch.log2(torch.arange(2, gains.shape[1] + 2, dtype=torch.float64))
    worth = torch.where(torch.arange(gains.shape[1]) < at, 1 / discounts, 0.0)
    best = (gains.sort(1, descending=True).values * worth).sum(1)
    found = (gains.gather(1, _order(scores, gains, present)) * worth).sum(1)
    some = best > 0
    return (found[some] / best[some]).sum(), some.sum()


def mrr(scores: Tensor, labels: Tensor, present: Tensor) -> Quotient:
    """Return the sum of 1 / rank of each row's first relevant candidate, and how many rows."""
    relevant = (labels > 0) & (present > 0)
    ordered = relevant.gather(1, _order(scores, relevant.double(), present))
    some = ordered.any(1)
    return (1 / (1 + ordered[some].double().argmax(1))).sum(), some.sum()


def auc(scores: Tensor, relevant: Tensor) -> Quotient:
    """Return the pairs of a relevant and another item in the right order, and all such pairs.

    The area under the ROC curve by ranks (Hanley and McNeil, 1982); equal scores count half. Scores
    and `relevant` are [items].
    """
    import torch

    _, places, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[places]
    many = relevant.sum().double()
    right = ranks[relevant].sum() - many * (many + 1) / 2
    return right, many * (len(scores) - many)


def _order(scores: Tensor, worth: Tensor, present: Tensor) -> Tensor:
    """Return the places of candidates by falling score, what is not there last."""
    lowest = scores.double().masked_fill(present == 0, -float("inf"))
    rising = worth.argsort(dim=1, stable=True)
    falling = lowest.gather(1, rising).argsort(dim=1, descending=True, stable=True)
    return rising.gather(1, falling)


def pearson(told: Tensor, values: Tensor, real: Tensor) -> Quotient:
    """Return Pearson's correlation of two columns, [rows]."""
    here = real > 0
    first, second = (column.double()[here] for column in (told, values))
    first, second = first - first.mean(), second - second.mean()
    return (first * second).sum(), (first.square().sum() * second.square().sum()).sqrt()
