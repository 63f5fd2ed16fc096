"""Lines on their way to a place that may be slow, or gone: the run waits for none of them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from regauge.errors import plain
from regauge.log import logger

MOST_WAITING = 10_000
"""Lines that are kept for a place that does not take them."""
MOST_AT_ONCE = 100
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""Before a line is tried again; doubled each time."""

T = TypeVar("T")


@dataclass(frozen=True)
class Line:
    """What is told of a run at one moment."""

    step: int
    values: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    """Texts that belong to the run, and to no step."""
    end: str = ""
    """How the run ended, in the place's words; empty while it goes on."""
    at: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    def __len__(self) -> int:
        return len(self.values) + len(self.notes)


Deliver = Callable[[list[Line]], None]


class Sender:
    """Hands lines to a place in their order, in a thread of its own.

    `connect` returns what takes lines there. Both are tried again after an error, until the run
    ends; lines that are `refused` are not.
    """

    def __init__(
        self, place: str, connect: Callable[[], Deliver], refused: Callable[[Exception], bool]
    ) -> None:
        self._place, self._connect, self._refused = place, connect, refused
        self._waiting: deque[Line] = deque()
        self._changed = threading.Condition()
        self._until: float | None = None
        self._given = self._taken = 0
        self._problem = ""
        self._thread = threading.Thread(target=self._work, name="sender", daemon=True)
        self._thread.start()

    def put(self, line: Line) -> None:
        """Take a line at once; where too many wait already, this one is lost."""
        with self._changed:
            self._given += len(line)
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(line)
                self._changed.notify()

    def close(self, seconds: float) -> int:
        """Wait so long for what is on its way; return how many values were lost, and say it."""
        with self._changed:
            self._until = time.monotonic() + seconds
            self._changed.notify()
        self._thread.join(seconds)
        lost = self._given - self._taken
        if lost:
            reason = self._problem or f"it was too slow to take them within {seconds:g} s"
            logger.warning("%d values did not get to %s: %s", lost, self._place, reason)
        return lost

    def _work(self) -> None:
        deliver = self._tried(self._connect)
        while deliver is not None and (lines := self._next()):
            if self._tried(partial(_delivered, deliver, lines)):
                self._taken += sum(map(len, lines))

    def _next(self) -> list[Line]:
        """Wait for lines and return some of them; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._until is not None)
            count = min(len(self._waiting), MOST_AT_ONCE)
            return [self._waiting.popleft() for _ in range(count)]

    def _tried(self, action: Callable[[], T]) -> T | None:
        """Return what an action returns, at last; None where it is refused or time is up."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return action()
            except Exception as error:  # noqa: BLE001 - none of them may end the run
                first = not self._problem
                self._problem = plain(error)[:200]
                refused = self._refused(error)
            if first and not refused:
                logger.warning(
                    "%s takes nothing yet, the run goes on: %s", self._place, self._problem
                )
            if refused or self._over(pause):
                return None
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _over(self, pause: float) -> bool:
        """Wait for a pause, or a short one where the run has ended; return whether time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._until is not None, pause)
            until = self._until
        if until is None:
            return False
        left = until - time.monotonic()
        time.sleep(max(0.0, min(left, FIRST_PAUSE_SECONDS)))
        return left <= 0


def _delivered(deliver: Deliver, lines: list[Line]) -> bool:
    deliver(lines)
    return True
