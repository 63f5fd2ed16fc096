"""Delivers metrics in a background thread, so a run never waits for a slow or absent server."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from regauge.system.errors import first_line
from regauge.system.log import logger

MAX_QUEUED_LINES = 10_000
"""Capacity of the queue; lines beyond it are lost."""
MAX_LINES_PER_DELIVERY = 100
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 30.0
"""First and longest pause before a retry; the pause doubles each time."""

T = TypeVar("T")


@dataclass(frozen=True)
class MetricsLine:
    """Metrics and tags of a run at one time."""

    step: int
    values: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    """Texts that belong to the run, not to a step."""
    final_status: str = ""
    """Status of a run that has ended, in the destination's terms; empty while it runs."""
    timestamp: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    def __len__(self) -> int:
        return len(self.values) + len(self.tags)


Deliver = Callable[[list[MetricsLine]], None]


class Sender:
    """Delivers lines to a destination in their order, in a background thread.

    `connect` returns the function that delivers lines. Both are retried after an error until the
    run ends, unless `is_permanent` is true for the error. `destination` names it in warnings.
    """

    def __init__(
        self,
        destination: str,
        connect: Callable[[], Deliver],
        is_permanent: Callable[[Exception], bool],
    ) -> None:
        self._destination, self._connect, self._is_permanent = destination, connect, is_permanent
        self._queue: deque[MetricsLine] = deque()
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._num_queued = self._num_delivered = 0
        self._problem = ""
        self._thread = threading.Thread(target=self._deliver_lines, name="sender", daemon=True)
        self._thread.start()

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
        deadline = time.monotonic() + seconds
        with self._changed:
            self._deadline = deadline
            self._changed.notify()
        while self._thread.is_alive() and (seconds_left := deadline - time.monotonic()) > 0:
            on_wait()
            self._thread.join(min(seconds_left, MIN_PAUSE_SECONDS))
        num_lost = self._num_queued - self._num_delivered
        if num_lost:
            reason = self._problem or f"no answer within {seconds:g} s"
            logger.warning("%d values not delivered to %s: %s", num_lost, self._destination, reason)
        return num_lost

    def _deliver_lines(self) -> None:
        deliver = self._retry(self._connect)
        while deliver is not None and (lines := self._take_lines()):
            if self._retry(partial(_deliver, deliver, lines)):
                self._num_delivered += sum(map(len, lines))

    def _take_lines(self) -> list[MetricsLine]:
        """Wait for lines and take some of them from the queue; returns none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._deadline is not None)
            count = min(len(self._queue), MAX_LINES_PER_DELIVERY)
            return [self._queue.popleft() for _ in range(count)]

    def _retry(self, action: Callable[[], T]) -> T | None:
        """Run an action until it succeeds; None after a permanent error or the deadline."""
        pause = MIN_PAUSE_SECONDS
        while True:
            try:
                return action()
            except Exception as error:  # noqa: BLE001 - no error of a tracker may end the run
                is_first = not self._problem
                self._problem = first_line(error)[:200]
                is_permanent = self._is_permanent(error)
            if is_first and not is_permanent:
                logger.warning(
                    "%s is unreachable, retrying in the background: %s",
                    self._destination,
                    self._problem,
                )
            if is_permanent or self._pause(pause):
                return None
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _pause(self, seconds: float) -> bool:
        """Pause, only briefly after the end of the run; return whether the deadline is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._deadline is not None, seconds)
            deadline = self._deadline
        if deadline is None:
            return False
        seconds_left = deadline - time.monotonic()
        time.sleep(max(0.0, min(seconds_left, MIN_PAUSE_SECONDS)))
        return seconds_left <= 0


def _deliver(deliver: Deliver, lines: list[MetricsLine]) -> bool:
    deliver(lines)
    return True
