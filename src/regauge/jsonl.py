"""Files of JSON lines that only ever grow, such as `metrics.jsonl` and `ledger.jsonl`.

A process that is killed may leave its last line torn. Such a line is ended before the next one is
written, so that it stays the only one that cannot be read.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import FileIO
    from pathlib import Path


def opened(path: Path) -> FileIO:
    """Open a file to append lines; a last line that a dead process left torn is ended first.

    Unbuffered, so that a line is with the operating system when `write` returns.
    """
    file = path.open("a+b", buffering=0)
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


def write(file: FileIO, document: Mapping[str, Any]) -> None:
    """Write one document as a line; raises ValueError for a number that JSON cannot write."""
    data = (json.dumps(document, allow_nan=False, default=str) + "\n").encode()
    while data:
        data = data[file.write(data) or 0 :]


def append(path: Path, document: Mapping[str, Any]) -> None:
    """Add one document at the end of a file."""
    with opened(path) as file:
        write(file, document)


def whole(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file, a torn one passed over; none where there is no file."""
    texts = path.read_bytes().splitlines() if path.exists() else []
    return [document for text in texts if (document := _parsed(text)) is not None]


def last(path: Path) -> dict[str, Any] | None:
    """Return the last whole line of a file; None where there is none."""
    texts = path.read_bytes().splitlines() if path.exists() else []
    return next(filter(None, map(_parsed, reversed(texts))), None)


class Tail:
    """The lines of a file that grows, each read once; there need not be a file yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the whole lines that were added since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        texts = data[:end].splitlines()
        return [document for text in texts if (document := _parsed(text)) is not None]


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    return document
