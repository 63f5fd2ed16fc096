"""Reads a source at intervals in a daemon thread, because the read may block for ever.

The driver of a broken device answers no call. The other metrics must still be served then.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
INTERVAL_SECONDS = 2.0
MAX_AGE_SECONDS = 15.0
"""Age after which a value is not returned: an alert notices a series that ends."""
CLOSE_SECONDS = 1.0


class PolledSource(Generic[T]):
    """The last value of a function that is called at intervals."""

    def __init__(
        self, open_reader: Callable[[], Callable[[], T]], interval: float = INTERVAL_SECONDS
    ) -> None:
        """Start the thread; it calls `open_reader` once, and the returned function repeatedly."""
        self._open_reader, self._interval = open_reader, interval
        self._value: tuple[float, T] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="polled-source", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)

    def read(self) -> T | None:
        """Return the last value; None without one, or if it is too old."""
        value = self._value
        if value is None or time.monotonic() - value[0] > MAX_AGE_SECONDS:
            return None
        return value[1]

    def _run(self) -> None:
        try:
            read = self._open_reader()
            while True:
                self._value = (time.monotonic(), read())
                if self._stop.wait(self._interval):
                    return
        except Exception as error:  # noqa: BLE001 (a driver may raise anything)
            logger.warning("device counters are no longer read: %s", error)
