"""JSON lines (.jsonl, .gz, .zst): one object per line, its texts and numbers are the fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from regauge.data.sources import Piece, Record, Rejected, _files, _values
from regauge.errors import DataError
from regauge.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator


class JsonLines(_files.FileSource):
    """Files with one JSON object per line."""

    columns: tuple[str, ...] = ()
    """Keys to read; none given means every text and number."""
    piece_mib: int = Field(default=8, ge=1)
    """Bytes that one process reads at a time."""

    def fields(self) -> tuple[str, ...]:
        """Return the named columns, if any."""
        return self.columns

    def divide(self, found: list[_files.File]) -> tuple[Piece, ...]:
        """Return small files together and large plain ones in parts."""
        return _files.group(found, self.piece_mib * MIB, divisible=True)

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield a record or a rejection for each line that is not blank.

        Raises DataError for a file that is one array: of its lines no more than the last would do.
        """
        for file, line in _files.lines(piece):
            if isinstance(line, Rejected):
                yield line
            elif line.place == _files.FIRST_LINE and _opens_array(line.data):
                problem = f"{file} is a JSON array, and not one object per line"
                raise DataError(problem, f"write it with: jq -c '.[]' {file}")
            elif line.data.strip():
                yield _values.parsed(file, line.place, line.data, self.columns)


def _opens_array(line: bytes) -> bool:
    """Return whether an array of objects begins in a line."""
    rest = line.strip()
    return rest.startswith(b"[") and rest[1:].lstrip()[:1] in (b"", b"{")
