"""A thread that delivers queued work, so that steps never wait for a slow or absent destination."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

LAST_PAUSE_SECONDS = 0.5
"""Longest pause before a retry at the end of a run."""
Work = TypeVar("Work")
Result = TypeVar("Result")


class DeliveryThread(threading.Thread, Generic[Work]):
    """Base class for threads that deliver work in order, with retries.

    The thread ends with the last work after `begin_close`.
    """

    min_pause_seconds: ClassVar[float]
    """First pause before a retry; the pause doubles each time."""
    max_pause_seconds: ClassVar[float]

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._changed = threading.Condition()
        self._queue: deque[Work] = deque()
        self._deadline: float | None = None

    def begin_close(self, deadline: float) -> None:
        """Shorten the pauses, and end the retries at `deadline` on time.monotonic()."""
        with self._changed:
            self._deadline = deadline
            self._changed.notify()

    def _gives_up(self, error: Exception) -> bool:
        """Return whether a retry is useless after an error."""
        raise NotImplementedError

    def _wait_for_work(self) -> bool:
        """Wait until work is queued; return False at the end of the run."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._deadline is not None)
            return bool(self._queue)

    def _retry(self, action: Callable[[], Result]) -> Result | None:
        """Run an action until it succeeds; None after the last error."""
        pause = self.min_pause_seconds
        while True:
            try:
                return action()
            except Exception as error:  # noqa: BLE001 (no error of a destination may end the run)
                if self._gives_up(error) or not self._pause(pause):
                    return None
            pause = min(2 * pause, self.max_pause_seconds)

    def _pause(self, seconds: float) -> bool:
        """Pause, only briefly at the end of the run; return whether there is time for a retry."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._deadline is not None, seconds):
                return True
            self._changed.wait(max(0.0, min(self._seconds_left(), seconds, LAST_PAUSE_SECONDS)))
        return self._seconds_left() > 0

    def _seconds_left(self) -> float:
        """Return the seconds until the deadline; infinity during the run."""
        return float("inf") if self._deadline is None else self._deadline - time.monotonic()
