"""The new lines of a file written by another process, and its end."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


TAIL_BYTES = 65536
"""Bytes at the end of a log to search for events and errors."""


class LineTail:
    """Reads each line of a growing file once; the file may not exist yet.

    A file that was replaced or truncated is read from its beginning, as by `tail -F`.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        """Start at the beginning of a file, or at its current end."""
        self._path = path
        self._status = path.stat() if from_end and path.exists() else None
        self._offset = self._status.st_size if self._status else 0

    def read_bytes(self, *, is_last: bool = False) -> list[bytes]:
        """Return the lines completed since the last call.

        The last call also returns an incomplete line.
        """
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                is_same = self._status is not None and os.path.samestat(status, self._status)
                if not is_same or status.st_size < self._offset:
                    self._offset = 0
                self._status = status
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        end = len(content) if is_last else content.rfind(b"\n") + 1
        self._offset += end
        return content[:end].splitlines()

    def read(self, *, is_last: bool = False) -> list[str]:
        """Return the same lines as text."""
        return [line.decode("utf-8", "replace") for line in self.read_bytes(is_last=is_last)]


def read_last_lines(path: Path, count: int) -> list[str]:
    """Return a log's last lines; empty if it is unreadable."""
    return read_end(path).strip().splitlines()[-count:]


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
