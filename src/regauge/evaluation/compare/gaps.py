"""Relative differences between two series, step by step, and the limits for judging them."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regauge.run_folders.series import Series

MIN_CHANGED_ITEMS = 6
"""Net number of changed items at which a count differs significantly.

A two-sided sign test rejects equality if 6 items change in the same direction: p = 2 / 2^6 = 3 %.
"""
COUNT_TOLERANCE = 1e-3
"""Largest distance from an integer at which a value counts as an item count."""


@dataclass(frozen=True)
class Gap:
    """Both runs' values at one step."""

    step: int
    baseline: float
    candidate: float

    @property
    def difference(self) -> float:
        """The relative difference; infinite if only one value is finite."""
        return relative_difference(self.baseline, self.candidate)

    @property
    def magnitude(self) -> float:
        """The larger absolute value."""
        return max(abs(self.baseline), abs(self.candidate))


@dataclass(frozen=True)
class MetricComparison:
    """One held-out metric in both runs, at every step evaluated by both."""

    name: str
    gaps: tuple[Gap, ...]
    noise: Series
    """Largest difference between the baseline and the repeats, up to each step."""
    tolerance: float
    """Largest relative difference that counts as equal."""
    num_items: float | None = None
    """Number of items averaged by the metric; None if unknown."""

    @cached_property
    def is_count(self) -> bool:
        """Whether the metric is a share of correct items, such as accuracy or recall."""
        values = [value for gap in self.gaps for value in (gap.baseline, gap.candidate)]
        return self.num_items is not None and all(
            _is_whole(value * self.num_items) for value in values
        )

    def resolution(self, gap: Gap) -> float:
        """Return the relative change caused by one item; 0 if the metric is not a count."""
        if self.num_items is None or not self.is_count:
            return 0.0
        return 1 / (gap.magnitude * self.num_items) if gap.magnitude else math.inf

    def limit(self, gap: Gap) -> float:
        """Return the maximum of tolerance, noise and a count's chance level."""
        chance_level = (MIN_CHANGED_ITEMS - 0.5) * self.resolution(gap)
        return max(self.tolerance, value_at(self.noise, gap.step), chance_level)

    @property
    def worst_gap(self) -> Gap:
        """The gap with the largest ratio to the limit."""
        return max(self.gaps, key=self.limit_ratio)

    def limit_ratio(self, gap: Gap) -> float:
        """Return the difference as a multiple of the limit."""
        return gap.difference / self.limit(gap)

    @property
    def is_within_limits(self) -> bool:
        """Whether all gaps are within their limits."""
        return all(gap.difference <= self.limit(gap) for gap in self.gaps)

    @property
    def can_resolve_tolerance(self) -> bool:
        """Whether one item changes the metric by at most the tolerance.

        A coarser metric cannot show agreement within the tolerance.
        """
        return all(self.resolution(gap) <= self.tolerance for gap in self.gaps)


def align(baseline: Series, candidate: Series) -> tuple[Gap, ...]:
    """Return both values at every shared step."""
    values = dict(candidate)
    return tuple(Gap(step, value, values[step]) for step, value in baseline if step in values)


def relative_difference(a: float, b: float) -> float:
    """Return |a - b| / max(|a|, |b|); infinity if only one is finite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def value_at(series: Series, step: int) -> float:
    """Return the value at a step, or at the last step before it; 0 if there is none."""
    end = bisect_right(series, step, key=lambda point: point[0])
    return series[end - 1][1] if end else 0.0


def _is_whole(count: float) -> bool:
    return math.isfinite(count) and abs(count - round(count)) <= COUNT_TOLERANCE
