"""The best of several timings: what else a machine does now and then is no property of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Timed = Callable[[], float]

TRIES = 3
"""Of each size before the last one."""


def best(seconds: Timed, during: float, tries: int = TRIES) -> float:
    """Return the least of the seconds that some work takes, tried so often and for so long."""
    until = time.perf_counter() + during
    least, count = seconds(), 1
    while time.perf_counter() < until or count < tries:
        least, count = min(least, seconds()), count + 1
    return least


def grown(
    made: Callable[[int], Timed], first: int, largest: int, enough: float
) -> tuple[int, Timed]:
    """Return the first size whose work takes long enough, and that work; sizes double.

    What takes less is measured for its launch. Each is done once before it is timed.
    """
    size = first
    while True:
        seconds = made(size)
        seconds()
        if 2 * size > largest or best(seconds, 0) >= enough:
            return size, seconds
        size *= 2
