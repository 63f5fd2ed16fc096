"""Handlers of SIGTERM and SIGINT, so that a run can save before it stops."""

from __future__ import annotations

import os
import signal
import threading
from abc import ABC, abstractmethod
from typing import Any, Self

from regauge import timing
from regauge.errors import PreemptedError

POLL_SECONDS = 0.02


class SignalHandler(ABC):
    """Handles both signals for the duration of a block; does nothing outside the main thread."""

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._previous:
            self.restore(number)

    @abstractmethod
    def handle(self, number: int) -> None:
        """Handle a signal."""

    def restore(self, number: int) -> None:
        """Restore the handler that a signal had before the block."""
        signal.signal(number, self._previous[number])

    def _on_signal(self, number: int, _frame: object) -> None:
        self.handle(number)


class StopRequest(SignalHandler):
    """Records a stop signal, so that the work ends at a point of its choice.

    A handler that raises could run inside of a destructor, where exceptions are lost. A second
    signal has its usual effect: the process ends at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._number: int | None = None

    @property
    def is_requested(self) -> bool:
        """Whether a signal has arrived."""
        return self._number is not None

    def handle(self, number: int) -> None:
        """Record a signal."""
        self._number = number
        for other in self._previous:
            self.restore(other)

    def raise_if_requested(self, remedy: str) -> None:
        """Raise KeyboardInterrupt after SIGINT, and PreemptedError after SIGTERM.

        For work that saves nothing before it ends; its exit codes are those of a shell.
        """
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.is_requested:
            raise PreemptedError("stopped by a signal", remedy)


class SupervisorSignals(SignalHandler):
    """The signals of a supervisor, forwarded to the processes of the attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stop_requested = False
        self.pids: list[int] = []

    def sleep(self, seconds: float) -> None:
        """Sleep until a signal arrives or the time is over."""
        timing.wait_for(lambda: self.is_stop_requested, seconds, poll_seconds=POLL_SECONDS)

    def handle(self, number: int) -> None:
        """Record that the run must stop, and forward the signal."""
        del number
        self.is_stop_requested = True
        self.forward()

    def forward(self) -> None:
        """Send SIGTERM to the processes of the attempt: they save and stop."""
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
