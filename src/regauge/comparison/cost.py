"""What it cost each run to come to a target: machine time, device time and dollars.

Lost work, starts and waits are part of it: the meter counts all for which machines were held. A run
measures itself at some steps only; between two of them the metric and the cost are taken to go
straight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.planning.catalog import chip_of, rate
from regauge.planning.settings import Price
from regauge.results.evaluation_table import lower_is_better
from regauge.training.settings import Target
from regauge.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.planning.catalog import Rate
    from regauge.results.run_folder import Run
    from regauge.results.series import Series

ACCOUNTS = ("machine_seconds", "device_seconds", "usd")


@dataclass(frozen=True)
class Spent:
    """What a run had spent when it came to the target, or that it never did.

    Every account is None where it is unknown, and where the target was never reached.
    """

    run: str
    step: float | None
    """Where the target lies, a fraction between two evaluations; None where it never did."""
    between: tuple[int, int] | None
    """The evaluations that it lies between; None where it is the first one, or never."""
    machine_seconds: float | None
    device_seconds: float | None
    usd: float | None
    joules: float | None
    """At most: device seconds times the chip's thermal design power."""
    rate: Rate | None
    """The price of one of its machines, and who says so."""
    best: tuple[int, float] | None
    """Step and value of the best measurement; None without any."""


def to_target(run: Run, target: Target, price: Price | None = None) -> Spent:
    """Return what a run spent up to a target, at its own price or at another one."""
    series = run.series.get(target.metric, ())
    for number, (step, value) in enumerate(series):
        if not target.reached({target.metric: value}):
            continue
        if number == 0:
            return _spent(run, target, float(step), None, price)
        before, last = series[number - 1]
        share = (target.value - last) / (value - last)
        return _spent(run, target, before + share * (step - before), (before, step), price)
    return _spent(run, target, None, None, price)


def common_target(runs: Sequence[Run], metric: str) -> Target | None:
    """Return the best value of a metric that every run came to; None where one has none."""
    bests = [_best(run.series.get(metric, ()), lower=lower_is_better(metric)) for run in runs]
    values = [best[1] for best in bests if best is not None]
    if len(values) < len(runs):
        return None
    if lower_is_better(metric):
        return Target(metric=metric, at_most=max(values))
    return Target(metric=metric, at_least=min(values))


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


def price_of(run: Run) -> Price:
    """Return the price that a run's own settings name; an empty one where they name none."""
    table = run.settings.get("execution", {}).get("price")
    return Price.model_validate(table) if isinstance(table, dict) else Price()


def _best(series: Series, *, lower: bool) -> tuple[int, float] | None:
    finite = [point for point in series if math.isfinite(point[1])]
    if not finite:
        return None
    return (min if lower else max)(finite, key=lambda point: point[1])


def _spent(
    run: Run,
    target: Target,
    step: float | None,
    evaluations: tuple[int, int] | None,
    price: Price | None,
) -> Spent:
    machine, device, usd = (
        None if step is None else between(run.spent.get(name, ()), step) for name in ACCOUNTS
    )
    own = price or price_of(run)
    known, chip = rate(own), chip_of(own)
    if price is not None:
        usd = (
            machine / SECONDS_PER_HOUR * known.usd_per_hour
            if machine is not None and known
            else None
        )
    watts = chip.tdp_watts if chip else None
    return Spent(
        run=run.name,
        step=step,
        between=evaluations,
        machine_seconds=machine,
        device_seconds=device,
        usd=usd,
        joules=device * watts if device is not None and watts is not None else None,
        rate=known,
        best=_best(run.series.get(target.metric, ()), lower=target.at_least is None),
    )
