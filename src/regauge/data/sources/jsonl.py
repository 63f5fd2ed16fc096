"""JSON lines (.jsonl, .gz, .zst): one object per line."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from regauge.data.sources import Piece, Record, Rejected, _files
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
        for file in piece.files:
            lines = _files.read_file_lines(file, piece.start, piece.stop)
            yield from _files.read_json_lines(file, lines, self.columns)
