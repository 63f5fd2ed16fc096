"""Load generator: a closed loop (one request at a time) and an open loop (scheduled arrivals).

In the open loop, request latency counts from the scheduled arrival, not from the start of the
computation. Queueing time is part of it (no coordinated omission), and requests that never start
count as infinitely late. The module knows nothing about the server.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from regauge.data.randomness import hash_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MIN_REQUESTS = 3
"""Minimum closed-loop requests, even if they take longer than the duration."""
MAX_DURATION_FACTOR = 2
"""Requests not started within this multiple of the arrival duration are dropped."""
SPIN_SECONDS = 1e-4
"""Seconds to spin before an arrival, because a sleeping process wakes about this late.

A longer spin would look like work, and a busy machine would take the CPU from the server.
"""

SEARCH_FACTOR = 2.0
"""Ratio between tried rates until the search has a lower and an upper bound."""


class Clock:
    """This machine's monotonic clock, in seconds."""

    def now(self) -> float:
        """Return the seconds since an arbitrary origin."""
        return time.perf_counter()

    def wait(self, until: float) -> None:
        """Wait until a time; return at once if it has passed."""
        seconds = until - self.now() - SPIN_SECONDS
        if seconds > 0:
            time.sleep(seconds)
        while self.now() < until:
            pass


class ClosedLoopResult(NamedTuple):
    milliseconds: list[float]
    """Latency per request."""
    seconds: float


def run_closed_loop(
    send_request: Callable[[], object], seconds: float, clock: Clock
) -> ClosedLoopResult:
    """Send requests one after the other for some seconds, at least `MIN_REQUESTS`."""
    latencies: list[float] = []
    start = now = clock.now()
    while now - start < seconds or len(latencies) < MIN_REQUESTS:
        send_request()
        end = clock.now()
        latencies.append(1e3 * (end - now))
        now = end
    return ClosedLoopResult(latencies, now - start)


def draw_arrivals(rate: float, seconds: float, *key: int) -> np.ndarray:
    """Return Poisson arrival times, [requests] float64 in seconds, ascending.

    Gaps are exponential with mean 1 / rate. Equal keys give equal arrivals.
    """
    count = int(rate * seconds + 6 * math.sqrt(rate * seconds)) + 16
    while True:
        words = hash_keys(*key, np.arange(count))
        uniform = (words >> np.uint64(11)).astype(np.float64) / 2.0**53
        times = np.cumsum(-np.log1p(-uniform)) / rate
        if times[-1] >= seconds:
            arrivals: np.ndarray = times[times < seconds]
            return arrivals
        count *= 2


def draw_bursts(rate: float, burst_size: int, seconds: float, *key: int) -> np.ndarray:
    """Return arrival times in simultaneous bursts, [requests] float64 in seconds, ascending.

    The bursts are a Poisson process with rate / burst_size. Equal keys give equal arrivals.
    """
    return np.repeat(draw_arrivals(rate / burst_size, seconds, *key), burst_size)


def run_open_loop(
    send_request: Callable[[], object], arrivals: Sequence[float], seconds: float, clock: Clock
) -> list[float]:
    """Send requests at their arrival times, in order, and return each latency in milliseconds.

    Latency counts from the arrival, however late the request starts. A request not started within
    `MAX_DURATION_FACTOR` times the seconds is dropped: its latency is infinite.
    """
    start = clock.now()
    latencies: list[float] = []
    for arrival in arrivals:
        if clock.now() - start > MAX_DURATION_FACTOR * seconds:
            break
        clock.wait(start + arrival)
        send_request()
        latencies.append(1e3 * (clock.now() - start - arrival))
    return latencies + [math.inf] * (len(arrivals) - len(latencies))


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return a percentile by the nearest-rank method.

    Returns None if no value is above it: the 99th percentile needs 100 values.
    """
    if len(values) * (100 - percent) < 100:  # noqa: PLR2004 - percent
        return None
    return sorted(values)[-(-len(values) * percent // 100) - 1]


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
            rate = lowest_failed / SEARCH_FACTOR
        elif math.isinf(lowest_failed):
            rate = highest_met * SEARCH_FACTOR
        elif lowest_failed <= highest_met * (1 + precision):
            break
        else:
            rate = math.sqrt(highest_met * lowest_failed)
    return highest_met or None
