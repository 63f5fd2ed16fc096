"""Timing of work, and waiting for what another thread or process does."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    Timed = Callable[[], float]

T = TypeVar("T")
TRIES = 3
"""Of each size before the last one."""
MAX_REPEATS, REPEAT_PAUSE_SECONDS, REPEAT_SECONDS = 4, 0.2, 2.0
"""Of an implausible measurement: how often it is repeated, the pause before each repetition, and
the time after which none is begun."""


def wait_for(
    find: Callable[[], T],
    timeout_seconds: float = math.inf,
    *,
    poll_seconds: float,
    on_poll: Callable[[], object] | None = None,
) -> T:
    """Call `find` until it returns something true or the time is over; return its last result.

    `on_poll` is called before each pause. `find` is called at least once, and once more when the
    time is over.
    """
    end = time.monotonic() + timeout_seconds
    while not (result := find()):
        left = end - time.monotonic()
        if left <= 0:
            break
        if on_poll is not None:
            on_poll()
        time.sleep(min(poll_seconds, left))
    return result


def best(seconds: Timed, during: float, tries: int = TRIES) -> float:
    """Return the least of the seconds that some work takes, tried so often and for so long.

    The least is taken because what else a machine does now and then is no property of the work.
    """
    until = time.perf_counter() + during
    least, count = seconds(), 1
    while time.perf_counter() < until or count < tries:
        least, count = min(least, seconds()), count + 1
    return least


def repeat_below(
    measure: Callable[[], float],
    floor: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[float, int]:
    """Return the largest of some measurements of a rate, and how many there were.

    The first that reaches `floor` ends them. A lower one is implausible: other work had the
    machine. It is repeated after a pause, in which that work may end.
    """
    highest, count = measure(), 1
    end = clock() + REPEAT_SECONDS
    while highest < floor and count <= MAX_REPEATS and clock() < end:
        sleep(REPEAT_PAUSE_SECONDS)
        highest, count = max(highest, measure()), count + 1
    return highest, count


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
