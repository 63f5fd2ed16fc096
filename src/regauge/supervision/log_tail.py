"""Logs the output of a process for the Python program that started the run."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from regauge.system.log import logger

if TYPE_CHECKING:
    from pathlib import Path

LEVELS = {"warning: ": logging.WARNING, "error: ": logging.ERROR}
"""Levels by the beginning of a line; all other lines are of level INFO."""
READ_SECONDS = 0.2
"""Interval between two reads of the file."""


class LogTail:
    """The lines that are appended to a log file; each is logged once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._read_at = 0.0

    def forward(self, *, is_end: bool = False) -> None:
        """Log the new complete lines, if the interval is over; at the end log all lines."""
        now = time.monotonic()
        if not is_end and now - self._read_at < READ_SECONDS:
            return
        self._read_at = now
        for line in self._read_lines(is_end=is_end):
            prefix = next(filter(line.startswith, LEVELS), "")
            logger.log(LEVELS.get(prefix, logging.INFO), "%s", line.removeprefix(prefix))

    def _read_lines(self, *, is_end: bool) -> list[str]:
        """Return the new lines; an incomplete line is returned only at the end."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        complete = content if is_end else content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode(errors="replace").splitlines()
