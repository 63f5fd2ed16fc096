"""How far two series are apart, step by step, and how much of it says something."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regauge.results.series import Series

SIGNIFICANT = 6
"""Items that change, all of them one way, before a sign test calls it a difference: 2 / 2^6 = 3 %.

A count that moved by fewer says nothing, however many items changed both ways.
"""
WHOLE = 1e-3
"""So near to a whole number of items is a count of them."""


@dataclass(frozen=True)
class Gap:
    """One value of both runs at one step."""

    step: int
    ours: float
    theirs: float

    @property
    def share(self) -> float:
        """The relative difference, of the larger of the two; infinite where one is not finite."""
        return relative(self.ours, self.theirs)

    @property
    def larger(self) -> float:
        """The larger of both magnitudes."""
        return max(abs(self.ours), abs(self.theirs))


@dataclass(frozen=True)
class Metric:
    """One held-out metric of both runs, at every step at which both measured it."""

    name: str
    gaps: tuple[Gap, ...]
    noise: Series
    """Largest difference of the first run from its repetitions, up to each step."""
    band: float
    items: float | None = None
    """How many items it is a mean over; None where that is unknown."""

    @cached_property
    def counts(self) -> bool:
        """Whether it is the share of its items that are right, as an accuracy or a recall is."""
        values = [value for gap in self.gaps for value in (gap.ours, gap.theirs)]
        return self.items is not None and all(_whole(value * self.items) for value in values)

    def grain(self, gap: Gap) -> float:
        """Return by how much one item more or less moves it, of its value; 0 for no count."""
        if self.items is None or not self.counts:
            return 0.0
        return 1 / (gap.larger * self.items) if gap.larger else math.inf

    def limit(self, gap: Gap) -> float:
        """Return what may differ: the band, the noise, or what items do by chance, the largest."""
        chance = (SIGNIFICANT - 0.5) * self.grain(gap)
        return max(self.band, at(self.noise, gap.step), chance)

    @property
    def worst(self) -> Gap:
        """The gap that exceeds its limit by most, or comes nearest to it."""
        return max(self.gaps, key=self.excess)

    def excess(self, gap: Gap) -> float:
        """Return a gap as a multiple of its limit."""
        return gap.share / self.limit(gap)

    @property
    def within(self) -> bool:
        """Whether no gap exceeds its limit."""
        return all(gap.share <= self.limit(gap) for gap in self.gaps)

    @property
    def fine(self) -> bool:
        """Whether one item moves it by no more than the band: only then it can show the band."""
        return all(self.grain(gap) <= self.band for gap in self.gaps)


def aligned(ours: Series, theirs: Series) -> tuple[Gap, ...]:
    """Return both values at every step that both series have."""
    other = dict(theirs)
    return tuple(Gap(step, value, other[step]) for step, value in ours if step in other)


def relative(ours: float, theirs: float) -> float:
    """Return |a - b| over the larger of |a| and |b|; infinite where only one is finite."""
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return math.inf
    return abs(ours - theirs) / max(abs(ours), abs(theirs))


def at(series: Series, step: int) -> float:
    """Return the value of a series at a step, or at the last one before it; 0 without any."""
    number = bisect_right(series, step, key=lambda point: point[0])
    return series[number - 1][1] if number else 0.0


def _whole(count: float) -> bool:
    return math.isfinite(count) and abs(count - round(count)) <= WHOLE
