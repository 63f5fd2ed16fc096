"""Intervals of predictions: 80 % of the measurements are between p10 and p90.

log(measured / predicted) is taken as normal. Its standard deviation is the one of rows that the
fit did not see, joined with the distance to the nearest measured row.
"""

from __future__ import annotations

import math

from regauge.planner.training_job import Estimate

NORMAL_P90 = 1.2815515655446004
"""The 90th percentile of the standard normal distribution."""
SPREAD_PER_DISTANCE = 0.05
"""Growth of the standard deviation for each unit of distance to the nearest measured row."""
NEAR = 1.0
"""Distance within which a measured row counts as near: a factor of e in one size."""


def widen(spread: float, distance: float) -> float:
    """Return the standard deviation at a distance from the nearest measured row."""
    return math.hypot(spread, SPREAD_PER_DISTANCE * max(distance - NEAR, 0.0))


def estimate(value: float, spread: float) -> Estimate:
    """Return an estimate around a value; `spread` is the standard deviation of its logarithm."""
    factor = math.exp(NORMAL_P90 * spread)
    return Estimate(value / factor, value, value * factor)


def overlaps(first: Estimate, second: Estimate) -> bool:
    """Return whether two estimates are a tie: each p50 is in the interval of the other."""
    inside = first.p10 <= second.p50 <= first.p90
    return inside and second.p10 <= first.p50 <= second.p90
