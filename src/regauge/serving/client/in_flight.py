"""The number of requests a client keeps in flight: fixed, or adapted to the server.

The adaptive number starts small. It doubles while throughput grows, then grows by one. It falls
back if more requests do not raise throughput, and a refusal lowers it. The module does no I/O, and
the caller passes the times.

Throughput follows from latency (Little's law): requests in flight / mean latency. Answers per
second would depend on how the answers are bunched.
"""

from __future__ import annotations

from collections.abc import Callable

INITIAL_IN_FLIGHT = 4
"""Initial number of requests in flight, without a hint from the server."""
MAX_IN_FLIGHT = 512
MIN_WINDOW_REQUESTS = 8
"""Minimum number of answers between two decisions."""
MIN_GROWTH = 1.05
"""Throughput ratio from which more requests in flight are worth it."""
REFUSAL_FACTOR = 0.7
"""Factor applied to the limit after a refusal."""
PROBE_INTERVAL = 8
"""Windows without growth after which one more request is tried."""
BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 5.0
"""Maximum wait before the first retry, and before any retry."""


class InFlight:
    """An in-flight limit that follows throughput and refusals, unless it is fixed."""

    def __init__(self, initial: int = INITIAL_IN_FLIGHT, *, is_fixed: bool = False) -> None:
        self.limit = initial if is_fixed else min(max(1, initial), MAX_IN_FLIGHT)
        """How many requests may be in flight now."""
        self._is_fixed = is_fixed
        self._is_doubling = True
        self._best_limit, self._best_rate = 1, 0.0
        self._num_idle_windows = 0
        self._lowered_at = float("-inf")
        self._num_skipped = 0
        self._num_requests = self._num_texts = 0
        self._seconds = 0.0

    def record_answer(self, num_texts: int, seconds: float) -> None:
        """Count an answer while `limit` requests are in flight; decide after each window."""
        if self._is_fixed:
            return
        if self._num_skipped > 0:
            self._num_skipped -= 1
            return
        self._num_requests += 1
        self._num_texts += num_texts
        self._seconds += seconds
        if self._num_requests < max(MIN_WINDOW_REQUESTS, 2 * self.limit):
            return
        rate = self.limit * self._num_texts / max(self._seconds, 1e-9)
        limit = self.limit
        self._decide(rate)
        # The answers of requests that were sent with the last limit do not count.
        self._start_window(max(limit, self.limit) if limit != self.limit else 0)

    def record_refusal(self, started_at: float, now: float) -> None:
        """Lower the limit, once for all requests that were in flight together.

        The refused request was sent at `started_at` seconds.
        """
        if self._is_fixed or started_at < self._lowered_at:
            return
        self._start_window(self.limit)
        self.limit = max(1, int(self.limit * REFUSAL_FACTOR))
        self._is_doubling = False
        self._lowered_at = now
        self._best_limit, self._best_rate = self.limit, 0.0

    def _start_window(self, num_skipped: int) -> None:
        """Restart the count, ignoring the next `num_skipped` answers."""
        self._num_skipped = num_skipped
        self._num_requests = self._num_texts = 0
        self._seconds = 0.0

    def _decide(self, rate: float) -> None:
        """Raise the limit if throughput grew; otherwise return to the best limit so far."""
        if rate > self._best_rate * MIN_GROWTH:
            self._best_limit, self._best_rate = self.limit, rate
            self._num_idle_windows = 0
            increase = self.limit if self._is_doubling else 1
            self.limit = min(self.limit + increase, MAX_IN_FLIGHT)
            return
        self._is_doubling = False
        if self.limit > self._best_limit:
            self.limit = self._best_limit
            self._num_idle_windows = 0
            return
        # The server may have become slower or faster: measure again at intervals.
        self._num_idle_windows += 1
        if self._num_idle_windows >= PROBE_INTERVAL:
            self._num_idle_windows = 0
            self._best_limit, self._best_rate = self.limit, rate
            self.limit = min(self.limit + 1, MAX_IN_FLIGHT)


def compute_wait(attempt: int, retry_after: float | None, uniform: Callable[[], float]) -> float:
    """Return the seconds until a request is sent again: exponential, with full jitter.

    `attempt` counts from 0. The server's `retry_after` is a minimum; jitter is added to it.
    """
    longest = min(BACKOFF_SECONDS * 2.0**attempt, MAX_BACKOFF_SECONDS)
    return (retry_after or 0.0) + uniform() * longest
