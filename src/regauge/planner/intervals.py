"""Prediction intervals: 80 % of the measurements are between p10 and p90.

log(measured / predicted) is taken as normal. Its standard deviation comes from rows not used in the
fit, joined with the distance to the nearest measured row.
"""

from __future__ import annotations

import math

from regauge.planner.training_job import Estimate

NORMAL_P90 = 1.2815515655446004
"""The standard normal distribution's 90th percentile."""
SPREAD_PER_DISTANCE = 0.05
"""Standard deviation growth per unit distance to the nearest measured row."""
NEAR = 1.0
"""Distance within which a measured row counts as near: a factor of e in one size."""


def widen(spread: float, distance: float) -> float:
    """Return the standard deviation at a distance from the nearest measured row."""
    return math.hypot(spread, SPREAD_PER_DISTANCE * max(distance - NEAR, 0.0))


def estimate(value: float, spread: float) -> Estimate:
    """Return an estimate around a value; `spread` is its logarithm's standard deviation."""
    factor = math.exp(NORMAL_P90 * spread)
    return Estimate(value / factor, value, value * factor)


def overlaps(first: Estimate, second: Estimate) -> bool:
    """Return whether two estimates tie: each p50 is in the other's interval."""
    inside = first.p10 <= second.p50 <= first.p90
    return inside and second.p10 <= first.p50 <= second.p90
