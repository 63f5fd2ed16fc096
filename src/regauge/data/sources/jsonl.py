"""JSON lines (.jsonl, .gz, .zst): one object per line."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from regauge.data.sources import Piece, Record, Rejected, _documents, _files
from regauge.system.errors import DataError
from regauge.system.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator


class JsonLines(_files.FileSource):
    """Files with one JSON object per line; its values are the fields."""

    peer_names: ClassVar[tuple[str, ...]] = ("json", "ndjson")

    columns: tuple[str, ...] = ()
    """Keys to read; by default all."""
    chunk_mib: int = Field(default=8, ge=1)
    """Piece size in MiB."""

    def field_names(self) -> tuple[str, ...]:
        return self.columns

    def divide_files(self, files: list[_files.InputFile]) -> tuple[Piece, ...]:
        """Group small files and divide large uncompressed ones."""
        return _files.group_files(files, self.chunk_mib * MIB, is_divisible=True)

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield a record or a rejection for each line that is not blank.

        Raises DataError if a file is one JSON array.
        """
        for file, line in _files.read_lines(piece):
            if isinstance(line, Rejected):
                yield line
            elif line.location == _files.FIRST_LINE and _starts_array(line.data):
                problem = f"{file} is a JSON array, not one object per line"
                raise DataError(problem, f"convert it with: jq -c '.[]' {file}")
            elif line.data.strip():
                yield _documents.parse_record(file, line.location, line.data, self.columns)


def _starts_array(line: bytes) -> bool:
    """Return whether a line starts an array of objects."""
    rest = line.strip()
    return rest.startswith(b"[") and rest[1:].lstrip()[:1] in (b"", b"{")
