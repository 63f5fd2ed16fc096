"""Parquet files: one record per row, its text and number columns are the fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.data.sources import Piece, _files, _tables

if TYPE_CHECKING:
    from collections.abc import Iterator


class Parquet(_tables.TableSource):
    """Parquet tables, read by row group."""

    form = "Parquet"
    part = "row group"

    def cut(self, file: _files.File) -> Iterator[Piece]:
        """Yield one piece per row group."""
        import pyarrow.parquet as pq

        with _files.open_anywhere(file.name) as where:
            about = pq.read_metadata(where)
        self.chosen(file.name, about.schema.to_arrow_schema())
        mark = _files.stamp([file])
        for number in range(about.num_row_groups):
            group = about.row_group(number)
            packed = sum(group.column(i).total_compressed_size for i in range(group.num_columns))
            label = f"{file.name} row group {number}"
            size = group.total_byte_size
            yield Piece(label, packed, size, mark, (file.name,), number, number + 1)

    def batches(self, piece: Piece) -> Iterator[tuple[int, Any]]:
        """Yield the batches of a row group."""
        import pyarrow.parquet as pq

        name = piece.files[0]
        with _files.open_anywhere(name) as where, pq.ParquetFile(where) as file:
            columns = self.chosen(name, file.schema_arrow)
            groups = [piece.start]
            for batch in file.iter_batches(_tables.ROWS_AT_A_TIME, groups, columns=columns):
                yield piece.start, batch
