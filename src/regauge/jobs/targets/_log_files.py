"""The end of a log file that another process writes."""

from __future__ import annotations

from pathlib import Path

TAIL_BYTES = 65536
"""Bytes at the end of a log that are searched for events and errors."""


def read_end(path: Path) -> str:
    """Return the last TAIL_BYTES of a file as text; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def find_last_line(path: Path) -> str:
    """Return the last line of a file; empty if there is none."""
    return read_end(path).strip().rpartition("\n")[2]
