"""Log files that another process writes: their new lines, and their end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

TAIL_BYTES = 65536
"""Bytes at the end of a log that are searched for events and errors."""


class LineReader:
    """Reads each line of a growing file once."""

    def __init__(self, path: Path) -> None:
        """Start at the beginning of the file."""
        self._path, self._offset = path, 0

    def read(self, *, is_last: bool) -> Iterator[str]:
        """Yield the lines since the last call; the last call also yields an unfinished line."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        end = len(content) if is_last else content.rfind(b"\n") + 1
        self._offset += end
        yield from (line.decode(errors="replace") for line in content[:end].splitlines())


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
