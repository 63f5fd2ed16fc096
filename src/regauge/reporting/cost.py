"""What it cost each run to come to a target: machine time, device time and dollars.

Lost work, starts and waits are part of it: the meter counts all for which machines were held. A run
measures itself at some steps only; between two of them the metric and the cost are taken to go
straight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.reporting.evaluation import lower_is_better

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.reporting.runs import Run
    from regauge.reporting.series import Series

ACCOUNTS = ("machine_seconds", "device_seconds", "usd")


@dataclass(frozen=True)
class Target:
    """A value of a metric that counts as converged."""

    metric: str
    value: float

    def reached(self, value: float) -> bool:
        """Return whether a value is the target or better."""
        return value <= self.value if lower_is_better(self.metric) else value >= self.value


@dataclass(frozen=True)
class Spent:
    """What a run had spent when it came to the target, or that it never did."""

    run: str
    step: float | None
    """Where the target lies, a fraction between two evaluations; None where it never did."""
    between: tuple[int, int] | None
    """The evaluations that it lies between; None where it is the first one, or never."""
    machine_seconds: float | None
    device_seconds: float | None
    usd: float | None
    """None where the price is unknown."""
    best: tuple[int, float] | None
    """Step and value of the best measurement; None without any."""


def to_target(run: Run, target: Target) -> Spent:
    """Return what a run spent up to a target."""
    series = run.series.get(target.metric, ())
    best = _best(series, target.metric)
    for number, (step, value) in enumerate(series):
        if not target.reached(value):
            continue
        if number == 0:
            return _spent(run, float(step), None, best)
        before, last = series[number - 1]
        share = (target.value - last) / (value - last)
        return _spent(run, before + share * (step - before), (before, step), best)
    return Spent(run.name, None, None, None, None, None, best)


def common_target(runs: Sequence[Run], metric: str) -> Target | None:
    """Return the best value of a metric that every run came to; None where one has none."""
    bests = [_best(run.series.get(metric, ()), metric) for run in runs]
    values = [best[1] for best in bests if best is not None]
    if len(values) < len(runs):
        return None
    return Target(metric, max(values) if lower_is_better(metric) else min(values))


def ranked(found: Sequence[Spent]) -> list[Spent]:
    """Return what came to the target at a known price, the cheapest first."""
    return sorted((one for one in found if one.usd is not None), key=lambda one: one.usd or 0.0)


def saving(cheap: Spent, dear: Spent) -> float | None:
    """Return the share of dollars that one saves over another; None where a price is unknown."""
    if cheap.usd is None or not dear.usd:
        return None
    return 1 - cheap.usd / dear.usd


def between(series: Series, step: float) -> float | None:
    """Return the value of a growing series at a step, straight between the steps that it has."""
    before = (0.0, 0.0)
    for known, value in series:
        if known >= step:
            wide = known - before[0]
            share = (step - before[0]) / wide if wide else 1.0
            return before[1] + share * (value - before[1])
        before = (float(known), value)
    return before[1] if series else None


def _best(series: Series, metric: str) -> tuple[int, float] | None:
    if not series:
        return None
    choose = min if lower_is_better(metric) else max
    return choose(series, key=lambda point: point[1])


def _spent(
    run: Run, step: float, evaluations: tuple[int, int] | None, best: tuple[int, float] | None
) -> Spent:
    machine, device, usd = (between(run.spent.get(name, ()), step) for name in ACCOUNTS)
    return Spent(run.name, step, evaluations, machine, device, usd, best)
