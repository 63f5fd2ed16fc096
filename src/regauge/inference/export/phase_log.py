"""Logs export phases, such as `compile` and `measure`; does not import torch."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERVAL_SECONDS = 5.0
"""Seconds between the log lines of a long phase."""


class PhaseLog:
    """A phase in progress, with a count of finished items."""

    def __init__(self, description: str, total: int, unit: str) -> None:
        self._description, self._total, self._unit = description, total, unit
        self._done = 0
        self._start = time.monotonic()

    def advance(self, count: int = 1) -> None:
        self._done += count

    def format_line(self) -> str:
        """Format the phase with finished items and seconds so far."""
        items = f"{self._done} of {self._total} {self._unit}, " if self._total else ""
        return f"{self._description}: {items}{time.monotonic() - self._start:.0f} s"


@contextmanager
def log_phase(
    description: str,
    total: int = 0,
    unit: str = "",
    *,
    interval_seconds: float = INTERVAL_SECONDS,
) -> Iterator[PhaseLog]:
    """Log when a phase begins, and the progress at intervals until the block ends.

    A thread writes the lines, because a compiler returns only when it is done. `total` is how many
    items the phase has, if they are counted.
    """
    phase = PhaseLog(description, total, unit)
    has_ended = threading.Event()

    def log_progress() -> None:
        while not has_ended.wait(interval_seconds):
            logger.info("%s", phase.format_line())

    logger.info("%s", description)
    thread = threading.Thread(target=log_progress, name="phase log", daemon=True)
    thread.start()
    try:
        yield phase
    finally:
        has_ended.set()
        thread.join()
