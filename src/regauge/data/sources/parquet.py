"""Parquet files: one record per row, its text and integer columns are the fields."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from regauge.data.sources import Piece, Record, Rejected, Source, _files
from regauge.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS_AT_A_TIME = 1024


class Parquet(Source):
    """Parquet tables, read by row group."""

    files: tuple[str, ...] = Field(min_length=1)
    """Globs; `**` crosses folders."""
    columns: tuple[str, ...] = ()
    """Columns to read; none given means every text and integer column."""

    def fields(self) -> tuple[str, ...]:
        """Return the named columns, if any."""
        return self.columns

    def pieces(self) -> tuple[Piece, ...]:
        """Return one piece per row group; a file that cannot be opened is one piece."""
        return tuple(piece for path in _files.find(self.files) for piece in self._row_groups(path))

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield the rows of a row group."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        name, row = piece.files[0], 0
        try:
            with pq.ParquetFile(name) as file:
                columns = self._columns(name, file.schema_arrow)
                groups = [piece.start]
                for batch in file.iter_batches(ROWS_AT_A_TIME, groups, columns=columns):
                    for document in batch.to_pylist():
                        place = f"row group {piece.start} row {row}"
                        yield Record(name, place, _files.usable(document, self.columns))
                        row += 1
        except UnicodeDecodeError as error:
            place = f"row group {piece.start} from row {row}"
            yield Rejected(name, place, "undecodable bytes", str(error))
        except (PermissionError, FileNotFoundError):
            raise
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
            place = f"row group {piece.start} from row {row}"
            yield Rejected(name, place, "damaged Parquet file", str(error).partition("\n")[0])

    def _columns(self, name: str, schema: Any) -> list[str]:
        import pyarrow.types as kinds

        missing = [column for column in self.columns if column not in schema.names]
        if missing:
            has = ", ".join(schema.names)
            raise DataError(f"{name} has no column '{missing[0]}'", f"name some of: {has}")
        wanted = (
            kinds.is_string,
            kinds.is_large_string,
            kinds.is_dictionary,
            kinds.is_integer,
            kinds.is_boolean,
        )
        usable = (field.name for field in schema if any(kind(field.type) for kind in wanted))
        return list(self.columns or usable)

    @staticmethod
    def _row_groups(path: Path) -> Iterator[Piece]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        mark, name = _files.stamp([path]), (str(path),)
        try:
            about = pq.read_metadata(path)
        except (pa.ArrowInvalid, OSError):
            size = path.stat().st_size
            yield Piece(str(path), size, size, mark, name)
            return
        for number in range(about.num_row_groups):
            group = about.row_group(number)
            packed = sum(group.column(i).total_compressed_size for i in range(group.num_columns))
            label = f"{path} row group {number}"
            yield Piece(label, packed, group.total_byte_size, mark, name, number, number + 1)
