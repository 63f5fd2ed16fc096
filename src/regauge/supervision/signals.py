"""SIGTERM and SIGINT, caught where a run can still do something about them."""

from __future__ import annotations

import os
import signal
import threading
from abc import ABC, abstractmethod
from typing import Any, Self

from regauge import timing

POLL_SECONDS = 0.02


class Caught(ABC):
    """Catches both signals for as long as the block lasts; nothing outside of the main thread."""

    def __init__(self) -> None:
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._old:
            self.give_back(number)

    @abstractmethod
    def caught(self, number: int) -> None:
        """Note a signal."""

    def give_back(self, number: int) -> None:
        """Catch a signal no longer: the next one does what it did before the block."""
        signal.signal(number, self._old[number])

    def _catch(self, number: int, _frame: object) -> None:
        self.caught(number)


class Signals(Caught):
    """Those of a supervisor, handed on to the processes of the attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.told = False
        self.pids: list[int] = []

    def sleep(self, seconds: float) -> None:
        """Wait, unless a signal comes."""
        timing.wait_for(lambda: self.told, seconds, poll_seconds=POLL_SECONDS)

    def caught(self, number: int) -> None:
        """Hand a signal on."""
        del number
        self.told = True
        self.forward()

    def forward(self) -> None:
        """Tell the processes of the attempt to save and stop."""
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
