"""Search of the saturation rate: the largest rate at which a server meets an objective."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FACTOR = 2.0
"""Ratio of two rates before the search is between two of them."""


def search_rate(
    meets: Callable[[float], bool], start: float, *, precision: float, max_trials: int
) -> float | None:
    """Return the largest rate that meets an objective; None if no tried rate does.

    The rate is doubled until a trial fails, or halved until one succeeds. Then the interval between
    the best and the next failed rate is bisected, in the geometric mean, until they differ by less
    than `precision`. `meets` runs one trial.
    """
    lowest_failed, highest_met, rate = math.inf, 0.0, start
    for _ in range(max_trials):
        if meets(rate):
            highest_met = rate
        else:
            lowest_failed = rate
        if highest_met == 0.0:
            rate = lowest_failed / FACTOR
        elif math.isinf(lowest_failed):
            rate = highest_met * FACTOR
        elif lowest_failed <= highest_met * (1 + precision):
            break
        else:
            rate = math.sqrt(highest_met * lowest_failed)
    return highest_met or None
