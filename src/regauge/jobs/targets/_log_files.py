"""The end of a log file written by another process."""

from __future__ import annotations

from pathlib import Path

TAIL_BYTES = 65536
"""Bytes at the end of a log to search for events and errors."""


def read_end(path: Path) -> str:
    """Return a file's last TAIL_BYTES as text; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def find_last_line(path: Path) -> str:
    """Return a file's last line; empty without lines."""
    return read_end(path).strip().rpartition("\n")[2]
