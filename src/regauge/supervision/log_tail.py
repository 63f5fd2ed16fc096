"""Logs a process's output if a Python program started the run."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from regauge.system.line_tail import LineTail
from regauge.system.log import logger

if TYPE_CHECKING:
    from pathlib import Path

LEVELS = {"warning: ": logging.WARNING, "error: ": logging.ERROR}
"""Line prefix -> level; all other lines are INFO."""
READ_SECONDS = 0.2
"""Polling interval."""


class LogTail:
    """Lines appended to a log file; each is logged once."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path, from_end=True)
        self._read_at = 0.0

    def forward(self, *, is_end: bool = False) -> None:
        """Log new complete lines if the interval is over; at the end log all lines."""
        now = time.monotonic()
        if not is_end and now - self._read_at < READ_SECONDS:
            return
        self._read_at = now
        for line in self._lines.read(is_last=is_end):
            prefix = next(filter(line.startswith, LEVELS), "")
            logger.log(LEVELS.get(prefix, logging.INFO), "%s", line.removeprefix(prefix))
