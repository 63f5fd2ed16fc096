"""Delivers metrics in a background thread, so a run never waits for a slow or absent server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from regauge.monitoring.delivery import DeliveryThread
from regauge.system.errors import first_line
from regauge.system.log import logger

MAX_QUEUED_LINES = 10_000
"""Queue capacity; lines beyond it are lost."""
MAX_LINES_PER_DELIVERY = 100
WAIT_SECONDS = 0.5


@dataclass(frozen=True)
class MetricsLine:
    """A run's metrics and tags at one time."""

    step: int
    values: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    """Texts about the run, not about a step."""
    final_status: str = ""
    """Final run status, in the destination's terms; empty while the run continues."""
    timestamp: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    def __len__(self) -> int:
        return len(self.values) + len(self.tags)


Deliver = Callable[[list[MetricsLine]], None]


class Sender(DeliveryThread[MetricsLine]):
    """Delivers lines to a destination in their order, in a background thread.

    `connect` returns the function that delivers lines. Both are retried after an error until the
    run ends, unless `is_permanent` is true for the error. `destination` names it in warnings.
    """

    min_pause_seconds, max_pause_seconds = 0.5, 30.0

    def __init__(
        self,
        destination: str,
        connect: Callable[[], Deliver],
        is_permanent: Callable[[Exception], bool],
    ) -> None:
        super().__init__("sender")
        self._destination, self._connect, self._is_permanent = destination, connect, is_permanent
        self._num_queued = self._num_delivered = 0
        self._problem = ""
        self.start()

    def put(self, line: MetricsLine) -> None:
        """Queue a line without waiting; the line is lost if the queue is full."""
        with self._changed:
            self._num_queued += len(line)
            if len(self._queue) < MAX_QUEUED_LINES:
                self._queue.append(line)
                self._changed.notify()

    def close(self, seconds: float, on_wait: Callable[[], None] = lambda: None) -> int:
        """Wait up to `seconds` for the queued lines; return and log the number of lost values.

        `on_wait` is called repeatedly while it waits.
        """
        self.begin_close(time.monotonic() + seconds)
        while self.is_alive() and (seconds_left := self._seconds_left()) > 0:
            on_wait()
            self.join(min(seconds_left, WAIT_SECONDS))
        num_lost = self._num_queued - self._num_delivered
        if num_lost:
            reason = self._problem or f"no answer within {seconds:g} s"
            logger.warning("%d values not delivered to %s: %s", num_lost, self._destination, reason)
        return num_lost

    def run(self) -> None:
        deliver = self._retry(self._connect)
        while deliver is not None and self._wait_for_work():
            with self._changed:
                count = min(len(self._queue), MAX_LINES_PER_DELIVERY)
                lines = [self._queue.popleft() for _ in range(count)]
            self._num_delivered += self._retry(partial(_deliver, deliver, lines)) or 0

    def _gives_up(self, error: Exception) -> bool:
        is_first, is_permanent = not self._problem, self._is_permanent(error)
        self._problem = first_line(error)[:200]
        if is_first and not is_permanent:
            message = "%s is unreachable, retrying in the background: %s"
            logger.warning(message, self._destination, self._problem)
        return is_permanent


def _deliver(deliver: Deliver, lines: list[MetricsLine]) -> int:
    """Deliver lines; return how many values they contain."""
    deliver(lines)
    return sum(map(len, lines))
