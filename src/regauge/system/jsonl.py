"""Append-only JSON Lines files, such as `metrics.jsonl` and `ledger.jsonl`.

A killed process may leave an incomplete last line. The next writer ends it first, so that only one
line is unreadable. Readers skip damaged lines, and log their number.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from regauge.system.errors import DataError
from regauge.system.files import format_json, open_in_place, read_content
from regauge.system.json_files import DocumentShape, find_mismatch, parse_object
from regauge.system.line_tail import LineTail
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import FileIO
    from pathlib import Path

REMEDY = "move it away"
RECENT_BYTES = 1 << 16
"""Bytes that `read_recent_lines` reads at the end of a file: about a hundred lines."""
Count = Annotated[int, Field(ge=0, le=2**53)]
"""A count, such as steps, that fits a double exactly."""


class StepLine(DocumentShape):
    """A line about a step in an attempt."""

    attempt: Count
    step: Count


def parse_number(value: object) -> float | None:
    """Return a number; None for other values."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]


def open_for_append(path: Path) -> FileIO:
    """Open a file for appending lines; an incomplete last line is ended first.

    The file is unbuffered: the operating system has a line when `write` returns. Raises
    SettingsError if the path is a link or no regular file.
    """
    file = open(path, "a+b", buffering=0, opener=open_in_place)  # noqa: SIM115 (returned)
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


def write_line(file: FileIO, document: Mapping[str, Any]) -> None:
    """Write one document as a line."""
    data = (format_json(document, default=str) + "\n").encode()
    while data:
        data = data[file.write(data) or 0 :]


def append_line(path: Path, document: Mapping[str, Any]) -> None:
    """Append one document to a file."""
    with open_for_append(path) as file:
        write_line(file, document)


def read_lines(
    path: Path,
    shape: type[DocumentShape] = DocumentShape,
    warnings: list[str] | None = None,
) -> list[dict[str, Any]]:
    """Return a file's documents with a shape; empty if the file is missing.

    Damaged lines are skipped. Their number is logged, and appended to `warnings`. Raises DataError
    if the path is not a regular file.
    """
    documents = [_parse_line(line, shape) for line in _split_lines(path)]
    _report_damage(path, documents.count(None), warnings)
    return [document for document in documents if document is not None]


def read_last_line(path: Path, shape: type[DocumentShape] = DocumentShape) -> dict[str, Any] | None:
    """Return the last document of a file with a shape, as `read_lines` does; None without one."""
    num_damaged = 0
    document = None
    for line in reversed(_split_lines(path)):
        document = _parse_line(line, shape)
        if document is not None:
            break
        num_damaged += 1
    _report_damage(path, num_damaged)
    return document


def read_recent_lines(
    path: Path, shape: type[DocumentShape] = DocumentShape, max_bytes: int = RECENT_BYTES
) -> list[dict[str, Any]]:
    """Return the documents at the end of a file that may be written meanwhile.

    Only the last `max_bytes` are read. Lines that are incomplete, damaged or of another shape are
    skipped silently. A missing or unreadable file counts as empty.
    """
    try:
        content = read_content(path, REMEDY, max_bytes) or b""
    except (DataError, OSError):
        return []
    documents = (_parse_line(line, shape) for line in content.splitlines() if line.strip())
    return [document for document in documents if document is not None]


class Tail:
    """Reads each line of a growing file once; the file may not exist yet."""

    def __init__(self, path: Path, shape: type[DocumentShape] = DocumentShape) -> None:
        """Start at the beginning of a file; lines of another shape are skipped."""
        self._shape = shape
        self._tail = LineTail(path)

    def read(self) -> list[dict[str, Any]]:
        """Return the documents appended since the last call."""
        documents = (_parse_line(line, self._shape) for line in self._tail.read_bytes())
        return [document for document in documents if document is not None]


def _split_lines(path: Path) -> list[bytes]:
    """Return a file's non-blank lines."""
    lines = (read_content(path, REMEDY) or b"").splitlines()
    return [line for line in lines if line.strip()]


def _parse_line(line: bytes, shape: type[DocumentShape]) -> dict[str, Any] | None:
    try:
        document = parse_object(line)
    except ValueError:
        return None
    return None if find_mismatch(document, shape) else document


def _report_damage(path: Path, num_damaged: int, warnings: list[str] | None = None) -> None:
    """Log the number of damaged lines, if any."""
    if not num_damaged:
        return
    plural = "s" * (num_damaged > 1)
    problem = f"{num_damaged} damaged or truncated line{plural} ignored"
    logger.warning("%s: %s", path, problem)
    if warnings is not None:
        warnings.append(f"{path.name}: {problem}")
