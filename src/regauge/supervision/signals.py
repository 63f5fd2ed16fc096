"""The stop signals of a supervisor, forwarded to the processes of an attempt."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from regauge.system import stop_signals, timing


class SupervisorSignals:
    """Whether the run must stop, and the processes of the attempt that receive the signal."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self._requested: int | None = None

    @property
    def number(self) -> int | None:
        """The signal that stops the run: the first one that arrived, or that of a request."""
        return stop_signals.find_signal() or self._requested

    @property
    def is_stop_requested(self) -> bool:
        """Whether the run must stop."""
        return self.number is not None

    def request_stop(self, number: int) -> None:
        """Stop the run as if a signal had arrived."""
        self._requested = number

    def sleep(self, seconds: float) -> None:
        """Sleep until a signal arrives or the time is over."""
        timing.wait_for(lambda: self.is_stop_requested, seconds)

    def forward(self) -> None:
        """Send SIGTERM to the processes of the attempt: they save and stop."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
