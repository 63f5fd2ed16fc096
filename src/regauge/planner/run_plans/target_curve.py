"""Steps to a target metric, from a short run's curve with its uncertainty.

The curve is a + b s^-c for a metric that falls, and a - b s^-c for one that rises; s counts steps.
Each exponent c on a grid, with asymptotes a around its best one, has a weight. It follows from the
best b's residuals. The steps to the target are quantiles over these weights. A curve that never
reaches the target counts as infinitely many steps.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.config.output_files import METRICS
from regauge.planner.training_job import Estimate
from regauge.system import jsonl
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from regauge.training.settings import Target

MIN_POINTS = 4
"""Fewest evaluations after step 0 for a curve with three parameters."""
MAX_POINTS = 100
"""Maximum evaluations used, evenly spaced."""
EXPONENTS = tuple(0.05 * 40 ** (step / 59) for step in range(60))
"""Values of the exponent c: from 0.05 to 2."""
DEVIATIONS = tuple(step / 4 for step in range(-12, 13))
"""Deviations from the best asymptote, in standard errors."""
NOISE_FLOOR = 0.01
"""Smallest standard deviation for a value, in units of the improvement so far."""
QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class TargetForecast:
    """When a run reaches its target."""

    steps: Estimate
    """Steps; infinite if the curve does not reach the target."""
    reach_probability: float
    """Weight of the curves that reach the target, 0 to 1."""
    num_points: int
    last_step: int
    best_value: float
    is_reached: bool
    """Whether the short run has reached the target already."""


def forecast_target(folder: Path, target: Target) -> TargetForecast:
    """Return the steps to a target, from a run folder's evaluations.

    Raises SettingsError if the run has too few evaluations for the metric, or if it did not
    improve.
    """
    points = read_points(folder, target.metric)
    is_rising = target.at_least is not None
    sign = -1.0 if is_rising else 1.0
    values = [(step, sign * value) for step, value in points]
    goal = sign * target.threshold
    best = min(value for _, value in values)
    last = points[-1][0]
    reached = [step for step, value in values if value <= goal]
    if reached:
        step = float(reached[0])
        return TargetForecast(
            Estimate(step, step, step), 1.0, len(points), last, sign * best, is_reached=True
        )
    improvement = values[0][1] - best
    if improvement <= 0:
        problem = f"{target.metric} did not improve in {folder}"
        raise SettingsError(problem, "measure a longer run, or correct the settings first")
    bound = find_bound([value for _, value in points], is_rising=is_rising)
    weighted = sorted(_weigh_curves(values, goal, improvement, bound))
    total = sum(weight for _, weight in weighted)
    quantiles = [_find_quantile(weighted, share * total) for share in QUANTILES]
    reach = sum(weight for steps, weight in weighted if math.isfinite(steps)) / total
    return TargetForecast(
        Estimate(*(max(steps, float(last)) for steps in quantiles)),
        reach,
        len(points),
        last,
        sign * best,
        is_reached=False,
    )


def read_points(folder: Path, metric: str) -> list[tuple[int, float]]:
    """Return a metric's steps and values; for a repeated step the last attempt is valid.

    Raises SettingsError if the run has too few values.
    """
    by_step: dict[int, float] = {}
    path = folder / METRICS
    if not path.is_file():
        problem = f"{folder} has no {METRICS}"
        raise SettingsError(problem, "name a run's output folder with evaluations")
    known: set[str] = set()
    for line in jsonl.read_lines(path, jsonl.StepLine):
        known |= {name for name in line if name.startswith("heldout")}
        value = line.get(metric)
        if isinstance(value, int | float) and math.isfinite(value) and line["step"] > 0:
            by_step[line["step"]] = float(value)
    if len(by_step) < MIN_POINTS:
        problem = f"{folder} has {len(by_step)} values of {metric}; a curve needs {MIN_POINTS}"
        names = "" if metric in known or not known else f"; its metrics: {', '.join(sorted(known))}"
        raise SettingsError(problem + names, "set evaluation.every_steps and run it again")
    points = sorted(by_step.items())
    stride = -(-len(points) // MAX_POINTS)
    return points[::-1][::stride][::-1]


def find_bound(values: Sequence[float], *, is_rising: bool) -> float:
    """Return the best possible value, with the sign of a falling metric.

    A rising metric between 0 and 1, such as a recall, ends at 1. A falling one with no value below
    0, such as a loss, ends at 0.
    """
    if is_rising:
        return -1.0 if max(values) <= 1 and min(values) >= 0 else -math.inf
    return 0.0 if min(values) >= 0 else -math.inf


def _weigh_curves(
    values: Sequence[tuple[int, float]],
    goal: float,
    improvement: float,
    bound: float,
) -> Iterator[tuple[float, float]]:
    """Yield the steps to the goal and the weight for each curve.

    For each exponent, the asymptotes lie around the best one, in units of its standard error.
    """
    fits = [(exponent, _fit_line(values, exponent)) for exponent in EXPONENTS]
    freedom = max(len(values) - 3, 1)
    smallest = min(residual for _, (_, residual, _) in fits)
    variance = max(smallest / freedom, (NOISE_FLOOR * improvement) ** 2)
    curves = []
    for exponent, (center, _, factor) in fits:
        powers = [step**-exponent for step, _ in values]
        for deviation in DEVIATIONS:
            asymptote = max(center + deviation * math.sqrt(variance * factor), bound)
            scale, residual = _fit_scale(values, powers, asymptote)
            steps = math.inf
            if goal > asymptote and scale > 0:
                steps = _compute_steps(scale / (goal - asymptote), exponent)
            curves.append((steps, residual))
    smallest = min(residual for _, residual in curves)
    for steps, residual in curves:
        yield steps, math.exp(-(residual - smallest) / (2 * variance))


def _fit_line(values: Sequence[tuple[int, float]], exponent: float) -> tuple[float, float, float]:
    """Return asymptote, residual, and asymptote variance, for values of variance 1.

    It is the line with the least squares over x = step^-exponent.
    """
    powers = [step**-exponent for step, _ in values]
    scale, asymptote = statistics.linear_regression(powers, [value for _, value in values])
    residual = sum(
        (value - asymptote - scale * power) ** 2
        for power, (_, value) in zip(powers, values, strict=True)
    )
    mean = statistics.fmean(powers)
    spread = sum((power - mean) ** 2 for power in powers)
    return asymptote, residual, 1 / len(values) + mean**2 / spread


def _compute_steps(ratio: float, exponent: float) -> float:
    """Return ratio^(1 / exponent), infinite if too large for a number."""
    power = math.log(ratio) / exponent
    return math.exp(power) if power < math.log(1e15) else math.inf


def _fit_scale(
    values: Sequence[tuple[int, float]], powers: Sequence[float], asymptote: float
) -> tuple[float, float]:
    """Return the least-squares scale b, and the sum of its squared residuals."""
    above = [value - asymptote for _, value in values]
    scale = statistics.linear_regression(powers, above, proportional=True).slope
    return scale, sum(
        (value - scale * power) ** 2 for value, power in zip(above, powers, strict=True)
    )


def _find_quantile(weighted: Sequence[tuple[float, float]], limit: float) -> float:
    """Return the smallest value at which the summed weights reach a limit."""
    totals = list(itertools.accumulate(weight for _, weight in weighted))
    return weighted[min(bisect.bisect_left(totals, limit), len(totals) - 1)][0]


def combine(first: Estimate, second: Estimate) -> Estimate:
    """Return the product of two independent estimates; their logarithms add in quadrature."""
    center = first.p50 * second.p50
    if not math.isfinite(center):
        return Estimate(first.p10 * second.p10, math.inf, math.inf)
    below = math.hypot(math.log(first.p50 / first.p10), math.log(second.p50 / second.p10))
    above = math.inf
    if math.isfinite(first.p90):
        above = math.hypot(math.log(first.p90 / first.p50), math.log(second.p90 / second.p50))
    return Estimate(center * math.exp(-below), center, center * math.exp(above))
