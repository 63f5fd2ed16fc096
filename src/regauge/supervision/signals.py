"""A supervisor's stop signals, forwarded to the processes of an attempt."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from regauge.system import stop_signals, timing


class SupervisorSignals:
    """Whether the run must stop, and the attempt's processes to signal."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self._requested: int | None = None

    @property
    def number(self) -> int | None:
        """The signal that stops the run: the first one received or requested."""
        return stop_signals.find_signal() or self._requested

    @property
    def is_stop_requested(self) -> bool:
        return self.number is not None

    def request_stop(self, number: int) -> None:
        """Stop the run as if a signal had arrived."""
        self._requested = number

    def sleep(self, seconds: float) -> None:
        """Sleep until a signal arrives or time is up."""
        timing.wait_for(lambda: self.is_stop_requested, seconds)

    def forward(self) -> None:
        """Send SIGTERM to the attempt's processes: they save and stop."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
