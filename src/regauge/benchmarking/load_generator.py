"""Requests to something that answers: one after the other, or whenever they come.

A request that waits for the one before it has waited since it came: its latency is counted from
the moment at which it was to arrive, and not from the one at which it could be begun. What is never
begun is counted as well. Nothing here knows what answers.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from regauge.data.randomness import keyed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FEWEST = 3
"""Requests of a closed loop, however long each takes."""
PATIENCE = 2
"""Times the seconds of the arrivals after which nothing more is begun: the rest was not served."""
SPIN_SECONDS = 1e-4
"""Before an arrival that are not slept: a system wakes a sleeper about so late.

More would make waiting look like work, and a busy machine takes the processor from who works.
"""


class Clock:
    """The time of this machine, in seconds."""

    def now(self) -> float:
        """Return the time since some moment."""
        return time.perf_counter()

    def wait(self, moment: float) -> None:
        """Return at a moment, at once where it is over."""
        rest = moment - self.now() - SPIN_SECONDS
        if rest > 0:
            time.sleep(rest)
        while self.now() < moment:
            pass


class Closed(NamedTuple):
    """Requests of which each came when the one before was answered."""

    milliseconds: list[float]
    """Of each."""
    seconds: float
    """Of all together."""


def closed(answer: Callable[[], object], seconds: float, clock: Clock) -> Closed:
    """Answer one request after the other for some seconds, and a few at least."""
    taken: list[float] = []
    began = now = clock.now()
    while now - began < seconds or len(taken) < FEWEST:
        answer()
        after = clock.now()
        taken.append(1e3 * (after - now))
        now = after
    return Closed(taken, now - began)


def arrivals(rate: float, seconds: float, *key: int) -> np.ndarray:
    """Return when requests come in some seconds, [requests] float64, in seconds and rising.

    They are a Poisson process: gaps are exponential with a mean of 1 / rate, drawn from the key.
    """
    count = int(rate * seconds + 6 * math.sqrt(rate * seconds)) + 16
    while True:
        words = keyed(*key, np.arange(count))
        uniform = (words >> np.uint64(11)).astype(np.float64) / 2.0**53
        moments = np.cumsum(-np.log1p(-uniform)) / rate
        if moments[-1] >= seconds:
            found: np.ndarray = moments[moments < seconds]
            return found
        count *= 2


def opened(
    answer: Callable[[], object], moments: Sequence[float], seconds: float, clock: Clock
) -> list[float]:
    """Answer requests that come at moments, in their order; return the milliseconds of each.

    They count from the moment, however late its answer is begun. A request whose answer has not
    been begun after `PATIENCE` times the seconds was not served: it took for ever.
    """
    began = clock.now()
    taken: list[float] = []
    for moment in moments:
        if clock.now() - began > PATIENCE * seconds:
            break
        clock.wait(began + moment)
        answer()
        taken.append(1e3 * (clock.now() - began - moment))
    return taken + [math.inf] * (len(moments) - len(taken))


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return the smallest value that so many percent do not exceed: its nearest rank.

    None where there are so few values that none lies beyond it: the 99th needs a hundred.
    """
    if len(values) * (100 - percent) < 100:  # noqa: PLR2004 - percent
        return None
    return sorted(values)[-(-len(values) * percent // 100) - 1]
