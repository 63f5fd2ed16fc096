"""Each run's cost to reach a target: machine time, device time, dollars and energy.

The cost includes startup, waiting and lost work: the cost meter counts all time for which machines
were held. Between two evaluations, the metric and the cost are interpolated linearly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.machines.catalog import find_chip, find_price
from regauge.machines.settings import Price
from regauge.run_folders.run_folder import COST_KEYS
from regauge.system.units import SECONDS_PER_HOUR
from regauge.tasks import find_direction
from regauge.training.settings import Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.machines.catalog import MachinePrice
    from regauge.run_folders.run_folder import RunFolder
    from regauge.run_folders.series import Series


@dataclass(frozen=True)
class CostToTarget:
    """Run cost up to the target; None if unknown or if the target was not reached."""

    run: str
    step: float | None
    """Interpolated step at the target; None if it was not reached."""
    interval: tuple[int, int] | None
    """Steps of the surrounding evaluations; None if the first one reached the target or none
    did."""
    machine_seconds: float | None
    device_seconds: float | None
    usd: float | None
    max_joules: float | None
    """Upper energy bound: device seconds times the chip's thermal design power."""
    price: MachinePrice | None
    """Price of one machine, with source; None if unknown."""
    best: tuple[int, float] | None
    """(step, value) of the best evaluation, if any."""


def compute_cost_to_target(
    run: RunFolder, target: Target, price: Price | None = None
) -> CostToTarget:
    """Return a run's cost up to a target, at the given price or the run's own."""
    series = run.series.get(target.metric, ())
    for index, (step, value) in enumerate(series):
        if not target.is_reached({target.metric: value}):
            continue
        if index == 0:
            return _build_cost(run, target, float(step), None, price)
        previous_step, previous = series[index - 1]
        fraction = (target.threshold - previous) / (value - previous)
        reached_step = previous_step + fraction * (step - previous_step)
        return _build_cost(run, target, reached_step, (previous_step, step), price)
    return _build_cost(run, target, None, None, price)


def find_common_target(runs: Sequence[RunFolder], metric: str) -> Target | None:
    """Return the best threshold reached by every run.

    Returns None if a run does not have a value, or if the metric does not have a direction.
    """
    direction = find_direction(metric, {})
    if direction is None:
        return None
    lower = direction == "min"
    bests = [_find_best(run.series.get(metric, ()), lower=lower) for run in runs]
    values = [best[1] for best in bests if best is not None]
    if len(values) < len(runs):
        return None
    if lower:
        return Target(metric=metric, at_most=max(values))
    return Target(metric=metric, at_least=min(values))


def rank_by_cost(costs: Sequence[CostToTarget]) -> list[CostToTarget]:
    """Return the runs that reached the target at a known price, cheapest first."""
    return sorted((cost for cost in costs if cost.usd is not None), key=lambda cost: cost.usd or 0)


def relative_saving(cheaper: CostToTarget, dearer: CostToTarget) -> float | None:
    """Return the fraction of dollars saved by the cheaper run; None if a cost is unknown."""
    if cheaper.usd is None or not dearer.usd:
        return None
    return 1 - cheaper.usd / dearer.usd


def interpolate(series: Series, step: float) -> float | None:
    """Interpolate linearly in a growing series that begins at 0 at step 0.

    Returns the last value beyond the last step, and None for an empty series.
    """
    previous_step, previous = 0.0, 0.0
    for next_step, value in series:
        if next_step >= step:
            width = next_step - previous_step
            fraction = (step - previous_step) / width if width else 1.0
            return previous + fraction * (value - previous)
        previous_step, previous = float(next_step), value
    return previous if series else None


def read_price(run: RunFolder) -> Price:
    """Return the price in a run's settings, or an empty one."""
    table = run.settings.get("execution", {}).get("price")
    return Price.model_validate(table) if isinstance(table, dict) else Price()


def _find_best(series: Series, *, lower: bool) -> tuple[int, float] | None:
    finite = [point for point in series if math.isfinite(point[1])]
    if not finite:
        return None
    return (min if lower else max)(finite, key=lambda point: point[1])


def _build_cost(
    run: RunFolder,
    target: Target,
    step: float | None,
    interval: tuple[int, int] | None,
    price: Price | None,
) -> CostToTarget:
    """Return the cost at a step; a given price recomputes dollars from machine time."""
    machine, device, usd = (
        None if step is None else interpolate(run.cost_series.get(name, ()), step)
        for name in COST_KEYS
    )
    settings = price or read_price(run)
    machine_price, chip = find_price(settings), find_chip(settings)
    if price is not None:
        usd = (
            machine / SECONDS_PER_HOUR * machine_price.usd_per_hour
            if machine is not None and machine_price
            else None
        )
    watts = chip.tdp_watts if chip else None
    return CostToTarget(
        run=run.name,
        step=step,
        interval=interval,
        machine_seconds=machine,
        device_seconds=device,
        usd=usd,
        max_joules=device * watts if device is not None and watts is not None else None,
        price=machine_price,
        best=_find_best(run.series.get(target.metric, ()), lower=target.at_least is None),
    )
