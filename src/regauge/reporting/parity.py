"""Whether one run came to what another did: held-out metrics side by side, and where they part.

Everything is read from what the runs wrote. Two runs are comparable where they saw the same rows
in the same order, from the same weights and with the same schedule; how they were computed is what
is compared.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from regauge.reporting.story import flat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from regauge.reporting.runs import Run
    from regauge.reporting.series import Series

Verdict = Literal["pass", "fail", "not shown"]
BAND = 0.001
"""Largest relative difference of a held-out metric that counts as none."""
EXACT = 1e-5
"""Equal programs agree to it for tens of steps; then their rounding has grown."""
NOISE = 4.0
"""A step has parted where the loss differs by so many times what a run differs from itself."""
LOSS, RATE = "train/loss", "train/learning_rate"
SAME = ("seed", "task", "model", "optimizer", "batch.rows", "stop.steps", "stop.epochs")
"""Settings, and tables of them, that comparable runs share."""
COMPUTED = ("model.attention", "model.path", "model.weights")
"""Below those tables, what only says how it is computed."""
FACTS = {"data_identity": "the prepared data", "weights": "the weights of step 0"}
"""What a run writes of itself, in words."""
ASIDE = ("output", "stop", "price", "evaluation.every_steps")
"""Settings whose difference says nothing."""


@dataclass(frozen=True)
class Difference:
    """A setting, or a fact, in which two runs differ."""

    key: str
    ours: Any
    theirs: Any


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


@dataclass(frozen=True)
class Metric:
    """One held-out metric of both runs, at every step at which both measured it."""

    name: str
    gaps: tuple[Gap, ...]
    noise: Series
    """Largest difference of the first run from its repetitions, up to each step."""
    band: float

    def limit(self, step: int) -> float:
        """Return what may differ at a step: the band, or the noise where that is larger."""
        return max(self.band, at(self.noise, step))

    @property
    def worst(self) -> Gap:
        """The gap that exceeds its limit by most, or comes nearest to it."""
        return max(self.gaps, key=lambda gap: gap.share / self.limit(gap.step))

    @property
    def within(self) -> bool:
        """Whether no gap exceeds its limit."""
        return all(gap.share <= self.limit(gap.step) for gap in self.gaps)


@dataclass(frozen=True)
class Parity:
    """What a comparison of a run with the first one found."""

    ours: str
    theirs: str
    prevented: tuple[Difference, ...]
    """Why they are not comparable; empty where they are."""
    computed: tuple[Difference, ...]
    """How their computations differ."""
    metrics: tuple[Metric, ...]
    losses: tuple[Gap, ...]
    """Of the training loss, at every step that both logged."""
    parted: int | None
    """First step whose training loss differs by more than noise; None where none does."""
    rescheduled: int | None
    """First step whose learning rate differs; None where none does."""
    measured: bool
    """Whether the noise was measured."""

    @property
    def verdict(self) -> Verdict:
        """Whether the second run is as good as the first, as far as these runs show it."""
        if self.prevented or not self.metrics:
            return "not shown"
        return "pass" if all(metric.within for metric in self.metrics) else "fail"


def compare(ours: Run, theirs: Run, noise: Sequence[Run] = (), band: float = BAND) -> Parity:
    """Compare a run with the first one; `noise` are repetitions of the first one."""
    differing = differences(ours, theirs)
    prevented = [found for found in differing if prevents(found.key)]
    names = [
        name
        for name in ours.series
        if not name.startswith("train/") and aligned(ours.series[name], theirs.series.get(name, ()))
    ]
    losses = aligned(ours.series.get(LOSS, ()), theirs.series.get(LOSS, ()))
    rates = aligned(ours.series.get(RATE, ()), theirs.series.get(RATE, ()))
    floor = _floor(LOSS, ours, noise)
    return Parity(
        ours=ours.name,
        theirs=theirs.name,
        prevented=tuple(prevented),
        computed=tuple(found for found in differing if not prevents(found.key)),
        metrics=tuple(_metric(name, ours, theirs, noise, band) for name in names),
        losses=losses,
        parted=next((gap.step for gap in losses if gap.share > _parted(floor, gap.step)), None),
        rescheduled=next((gap.step for gap in rates if gap.share > EXACT), None),
        measured=bool(noise),
    )


def _metric(name: str, ours: Run, theirs: Run, noise: Sequence[Run], band: float) -> Metric:
    gaps = aligned(ours.series[name], theirs.series[name])
    return Metric(name, gaps, _floor(name, ours, noise), band)


def differences(ours: Run, theirs: Run) -> list[Difference]:
    """Return every setting and fact in which two runs differ, but those that say nothing."""
    first, second = _told(ours), _told(theirs)
    keys = [*first, *(key for key in second if key not in first)]
    return [
        Difference(key, first.get(key), second.get(key))
        for key in keys
        if first.get(key) != second.get(key) and not _under(key, ASIDE, but=SAME)
    ]


def prevents(key: str) -> bool:
    """Return whether runs that differ in this are not comparable."""
    return key in FACTS.values() or (_under(key, SAME) and not _under(key, COMPUTED))


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
    number = bisect_right([known for known, _ in series], step)
    return series[number - 1][1] if number else 0.0


def _parted(floor: Series, step: int) -> float:
    return max(EXACT, NOISE * at(floor, step))


def _floor(name: str, ours: Run, noise: Sequence[Run]) -> Series:
    """Return by step the largest difference so far of a run from its repetitions."""
    shares: dict[int, float] = {}
    for run in noise:
        for gap in aligned(ours.series.get(name, ()), run.series.get(name, ())):
            shares[gap.step] = max(shares.get(gap.step, 0.0), gap.share)
    largest, found = 0.0, []
    for step in sorted(shares):
        largest = max(largest, shares[step])
        found.append((step, largest))
    return tuple(found)


def _told(run: Run) -> Mapping[str, Any]:
    facts = {words: run.facts.get(name) for name, words in FACTS.items()}
    return {**facts, **dict(flat(run.settings))}


def _under(key: str, tables: tuple[str, ...], but: tuple[str, ...] = ()) -> bool:
    inside = any(key == table or key.startswith(f"{table}.") for table in tables)
    return inside and not any(key == table for table in but)
