"""JSON lines (.jsonl, .gz, .zst): one object per line, its texts and numbers are the fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from regauge.data.sources import Piece, Record, Rejected, _files, _values

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
        return _files.group(found, self.piece_mib * 2**20, divisible=True)

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield a record or a rejection for each line that is not blank."""
        for file, line in _files.lines(piece):
            if isinstance(line, Rejected):
                yield line
            elif line.data.strip():
                yield _values.parsed(file, line.place, line.data, self.columns)
