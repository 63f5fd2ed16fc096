"""What a verb says while it works: lines for people, one JSON document for machines.

Lines go to standard error, so that standard output holds the answer alone.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from rich.console import Console

stderr = Console(stderr=True, highlight=False, soft_wrap=True)
stdout = Console(highlight=False, soft_wrap=True)
logger = logging.getLogger("regauge")
SECONDS_BETWEEN_LINES = 10.0
"""Of progress, when no person watches."""


class _Lines(logging.Handler):
    """Prints a record as one line; a warning and worse carries its level."""

    def emit(self, record: logging.LogRecord) -> None:
        style = {"WARNING": "yellow", "ERROR": "red"}.get(record.levelname, "")
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        stderr.print(prefix + record.getMessage(), style=style, markup=False)


def configure(*, quiet: bool = False) -> None:
    """Send the lines of this process to standard error; `quiet` keeps warnings and errors."""
    logger.handlers[:] = [_Lines()]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False


def interactive() -> bool:
    """Return whether a person watches: live progress is for terminals alone."""
    return stderr.is_terminal


def answer(document: dict[str, Any]) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.write(json.dumps(document, indent=2, sort_keys=True, default=str) + "\n")
    sys.stdout.flush()
