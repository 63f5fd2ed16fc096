"""Append-only JSON Lines files, such as `metrics.jsonl` and `ledger.jsonl`.

A killed process may leave an incomplete last line. The next writer ends that line first, so that
only one line is unreadable. Readers skip it.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import FileIO
    from pathlib import Path


def open_for_append(path: Path) -> FileIO:
    """Open a file for appending lines; an incomplete last line is ended first.

    The file is unbuffered: the operating system has a line when `write` returns.
    """
    file = path.open("a+b", buffering=0)
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


def write_line(file: FileIO, document: Mapping[str, Any]) -> None:
    """Write one document as a line; raises ValueError for NaN and infinity."""
    data = (json.dumps(document, allow_nan=False, default=str) + "\n").encode()
    while data:
        data = data[file.write(data) or 0 :]


def append_line(path: Path, document: Mapping[str, Any]) -> None:
    """Append one document to a file."""
    with open_for_append(path) as file:
        write_line(file, document)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a file, without incomplete lines; none if the file is missing."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [document for line in lines if (document := _parse_line(line)) is not None]


def read_last_line(path: Path) -> dict[str, Any] | None:
    """Return the last complete document of a file; None if there is none."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return next(filter(None, map(_parse_line, reversed(lines))), None)


class Tail:
    """Reads each line of a growing file once; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the documents that were appended since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        lines = data[:end].splitlines()
        return [document for line in lines if (document := _parse_line(line)) is not None]


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return document
