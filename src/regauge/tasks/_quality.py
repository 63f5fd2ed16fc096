"""Classification, regression and ranking metrics over a whole split.

Each function returns a ratio as (numerator, denominator), both scalars. The caller divides, so an
empty split does not divide zero by zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.tasks import ClassMetrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Ratio = tuple["Tensor", "Tensor"]


@dataclass(frozen=True)
class ClassCounts:
    """Row counts by class, [classes] float64."""

    correct: Tensor
    """True positives."""
    predicted: Tensor
    actual: Tensor

    @classmethod
    def count(cls, predicted: Tensor, labels: Tensor, real: Tensor, classes: int) -> ClassCounts:
        """Count predicted and actual classes, [rows] int64; `real` is 0 for padding rows."""
        import torch

        weight = real.to(torch.float64)

        def sum_by_class(kinds: Tensor, amount: Tensor) -> Tensor:
            return torch.zeros(classes, dtype=torch.float64).index_add_(0, kinds, amount)

        return cls(
            correct=sum_by_class(labels, weight * (predicted == labels)),
            predicted=sum_by_class(predicted, weight),
            actual=sum_by_class(labels, weight),
        )

    @classmethod
    def count_sets(cls, predicted: Tensor, labels: Tensor, real: Tensor) -> ClassCounts:
        """Count rows with any number of classes; both arguments are [rows, classes] bool."""
        import torch

        is_real = (real > 0)[:, None]

        def sum_rows(cells: Tensor) -> Tensor:
            return (cells & is_real).sum(0).to(torch.float64)

        return cls(sum_rows(predicted & labels), sum_rows(predicted), sum_rows(labels))

    def accuracy(self) -> Ratio:
        return self.correct.sum(), self.actual.sum()

    def describe(self, names: Sequence[str]) -> list[ClassMetrics]:
        """Return per-class metrics; a ratio without items is 0, as in scikit-learn."""

        def divide(numerator: Tensor, denominator: Tensor) -> list[float]:
            ratio: list[float] = (numerator / denominator.clamp_min(1)).tolist()
            return ratio

        columns = zip(
            names,
            divide(self.correct, self.predicted),
            divide(self.correct, self.actual),
            divide(2 * self.correct, self.predicted + self.actual),
            self.actual.tolist(),
            strict=True,
        )
        return [
            ClassMetrics(name=name, precision=precision, recall=recall, f1=f1, support=int(support))
            for name, precision, recall, f1, support in columns
        ]

    def f1(self) -> Ratio:
        """Return F1 for class 1 if there are two classes, else macro F1.

        F1 is 2 TP / (2 TP + FP + FN) (van Rijsbergen, 1979). Macro F1 is the mean over the classes
        that occur.
        """
        total = self.predicted + self.actual
        if len(total) == 2:  # noqa: PLR2004 - GLUE scores the second class of a binary task
            return 2 * self.correct[1], total[1]
        occurs = total > 0
        return (2 * self.correct[occurs] / total[occurs]).sum(), occurs.sum()

    def micro_f1(self) -> Ratio:
        """Return F1 over all rows and classes together."""
        return 2 * self.correct.sum(), (self.predicted + self.actual).sum()

    def macro_f1(self) -> Ratio:
        """Return the mean F1 over all classes; 0 for a class that does not occur."""
        f1 = 2 * self.correct / (self.predicted + self.actual).clamp_min(1)
        return f1.sum(), f1.new_tensor(len(f1))

    def matthews(self) -> Ratio:
        """Return the Matthews correlation for any number of classes (R_K, Gorodkin, 2004)."""
        rows = self.actual.sum()
        covariance = self.correct.sum() * rows - (self.predicted * self.actual).sum()
        variances = [
            rows.square() - counts.square().sum() for counts in (self.predicted, self.actual)
        ]
        return covariance, (variances[0] * variances[1]).sqrt()


def confusion_matrix(predicted: Tensor, labels: Tensor, classes: int) -> list[list[int]]:
    """Count rows, [actual class, predicted class]; both arguments are [rows]."""
    import torch

    cells = torch.bincount(labels * classes + predicted, minlength=classes * classes)
    matrix: list[list[int]] = cells.view(classes, classes).tolist()
    return matrix


def ndcg(scores: Tensor, labels: Tensor, present: Tensor, at: int) -> Ratio:
    """Sum NDCG@`at` over the rows with a relevant candidate, and count these rows.

    Gains are 2^label - 1, discounts log2 (Burges et al., 2005). Scores, labels and `present` are
    [rows, candidates]. Among equal scores the less relevant candidate is ranked first.
    """
    import torch

    gains = torch.where(present > 0, torch.exp2(labels.double()) - 1, 0.0)
    discounts = torch.log2(torch.arange(2, gains.shape[1] + 2, dtype=torch.float64))
    weights = torch.where(torch.arange(gains.shape[1]) < at, 1 / discounts, 0.0)
    ideal_dcg = (gains.sort(1, descending=True).values * weights).sum(1)
    dcg = (gains.gather(1, _sort_by_score(scores, gains, present)) * weights).sum(1)
    is_counted = ideal_dcg > 0
    return (dcg[is_counted] / ideal_dcg[is_counted]).sum(), is_counted.sum()


def mrr(scores: Tensor, labels: Tensor, present: Tensor) -> Ratio:
    """Sum 1 / rank over each row's first relevant candidate, and count these rows."""
    relevant = (labels > 0) & (present > 0)
    ordered = relevant.gather(1, _sort_by_score(scores, relevant.double(), present))
    is_counted = ordered.any(1)
    return (1 / (1 + ordered[is_counted].double().argmax(1))).sum(), is_counted.sum()


def auc(scores: Tensor, relevant: Tensor) -> Ratio:
    """Count correctly ordered (relevant, irrelevant) pairs, and all such pairs.

    This is the area under the ROC curve, computed by ranks (Hanley and McNeil, 1982). Equal scores
    count half. Scores and `relevant` are [items].
    """
    ranks = _rank_values(scores.double())
    num_relevant = relevant.sum().double()
    ordered_pairs = ranks[relevant].sum() - num_relevant * (num_relevant + 1) / 2
    return ordered_pairs, num_relevant * (len(scores) - num_relevant)


def pearson(predicted: Tensor, values: Tensor, real: Tensor) -> Ratio:
    """Return Pearson's correlation between two columns, [rows]; `real` is 0 for padding rows."""
    x, y = (column.double()[real > 0] for column in (predicted, values))
    x, y = x - x.mean(), y - y.mean()
    return (x * y).sum(), (x.square().sum() * y.square().sum()).sqrt()


def spearman(predicted: Tensor, values: Tensor, real: Tensor) -> Ratio:
    """Return Spearman's correlation between two columns, [rows]: Pearson's over ranks.

    Equal values have their mean rank. `real` is 0 for padding rows.
    """
    x, y = (_rank_values(column.double()[real > 0]) for column in (predicted, values))
    return pearson(x, y, real[real > 0])


def _rank_values(values: Tensor) -> Tensor:
    """Rank values from 1, [rows]; equal values have their mean rank."""
    import torch

    _, groups, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(0) - (counts - 1) / 2
    return ranks.double()[groups]


def _sort_by_score(scores: Tensor, gains: Tensor, present: Tensor) -> Tensor:
    """Return candidate indices by falling score, then rising gain; padding candidates are last."""
    masked_scores = scores.double().masked_fill(present == 0, -float("inf"))
    rising_gain = gains.argsort(dim=1, stable=True)
    falling_score = masked_scores.gather(1, rising_gain).argsort(
        dim=1, descending=True, stable=True
    )
    return rising_gain.gather(1, falling_score)
