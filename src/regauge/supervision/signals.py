"""SIGTERM and SIGINT of a supervisor, handed on to the processes that it has started."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Self

LOOK_SECONDS = 0.02


class Signals:
    """SIGTERM and SIGINT, noted here and handed on to the processes of the attempt."""

    def __init__(self) -> None:
        self.told = False
        self.pids: list[int] = []
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._old[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def sleep(self, seconds: float) -> None:
        """Wait, unless a signal comes."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.told:
            time.sleep(LOOK_SECONDS)

    def _catch(self, _number: int, _frame: object) -> None:
        self.told = True
        self.forward()

    def forward(self) -> None:
        """Tell the processes of the attempt to save and stop."""
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
