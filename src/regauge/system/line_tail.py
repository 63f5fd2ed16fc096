"""The last lines of a file written by another process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class LineTail:
    """Reads each line of a growing file once; the file may not exist yet."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        """Start at the beginning of a file, or at its current end."""
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read_bytes(self, *, is_last: bool = False) -> list[bytes]:
        """Return the lines completed since the last call.

        The last call also returns an incomplete line.
        """
        try:
            with self._path.open("rb") as file:
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
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.strip().splitlines()[-count:]
