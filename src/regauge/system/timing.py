"""Timing of work, and waiting for another thread or process."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, TypeVar

from regauge.system import stop_signals

if TYPE_CHECKING:
    from collections.abc import Callable

    TimedWork = Callable[[], float]

T = TypeVar("T")
POLL_SECONDS = 0.05
"""Polling interval for the end of a local process, a file or a lock."""
REMOTE_POLL_SECONDS = 0.5
"""Polling interval for a scheduler or another machine."""
SERVICE_POLL_SECONDS = 10.0
"""Polling interval for a cloud service that starts machines, and limits requests."""
PAUSE_SECONDS = 2.0
"""Longest gap between two polls of a process that was not stopped."""
MIN_TRIES = 3
"""Default minimum number of measurements."""
MAX_REPEATS, REPEAT_PAUSE_SECONDS, REPEAT_SECONDS = 4, 0.2, 2.0
"""Limits on repeating an implausible measurement: count, pause before each repeat, and the time
after which repeats stop."""


class PauseDetector:
    """Notices from a gap between polls that this process was stopped, as by `scontrol suspend`."""

    def __init__(self) -> None:
        self._polled_at = time.monotonic()
        self.resumed_at = -math.inf
        """When the process last continued, on time.monotonic(); -inf if it was never stopped."""

    def poll(self) -> float:
        """Look at the clock; return `resumed_at`."""
        now = time.monotonic()
        if now - self._polled_at > PAUSE_SECONDS:
            self.resumed_at = now
        self._polled_at = now
        return self.resumed_at


def wait_for(
    find: Callable[[], T],
    timeout_seconds: float = math.inf,
    *,
    poll_seconds: float = POLL_SECONDS,
    on_poll: Callable[[], object] | None = None,
) -> T:
    """Call `find` until its result is true or time is up; return the last result.

    `on_poll` is called before each pause. `find` is called at least once, and again at the end of
    the timeout. Raises StopSignalError after a stop signal.
    """
    deadline = time.monotonic() + timeout_seconds
    while not (result := find()):
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            break
        stop_signals.check_stop()
        if on_poll is not None:
            on_poll()
        time.sleep(min(poll_seconds, seconds_left))
    return result


def measure_min_seconds(
    work: TimedWork, min_total_seconds: float, min_tries: int = MIN_TRIES
) -> float:
    """Measure some work repeatedly; return the shortest duration in seconds.

    `work` returns the duration of one run. The minimum is used because other load on the machine
    can only lengthen a run.
    """
    deadline = time.perf_counter() + min_total_seconds
    shortest, count = work(), 1
    while time.perf_counter() < deadline or count < min_tries:
        shortest, count = min(shortest, work()), count + 1
    return shortest


def repeat_below(
    measure: Callable[[], float],
    floor: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[float, int]:
    """Measure a rate until it reaches `floor`; return the highest rate and their number.

    A rate below `floor` is implausible: other work was using the machine. The measurement is
    repeated after a pause in which that work may end.
    """
    highest, count = measure(), 1
    deadline = clock() + REPEAT_SECONDS
    while highest < floor and count <= MAX_REPEATS and clock() < deadline:
        sleep(REPEAT_PAUSE_SECONDS)
        highest, count = max(highest, measure()), count + 1
    return highest, count


def find_timed_size(
    build_work: Callable[[int], TimedWork], min_size: int, max_size: int, min_seconds: float
) -> tuple[int, TimedWork]:
    """Double a size until the work takes `min_seconds`; return the size and the work.

    A shorter run would mostly measure launch overhead. Each work runs once before it is timed.
    """
    size = min_size
    while True:
        work = build_work(size)
        work()
        if 2 * size > max_size or measure_min_seconds(work, 0) >= min_seconds:
            return size, work
        size *= 2
