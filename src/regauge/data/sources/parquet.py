"""Parquet files: one record per row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.data.sources import Piece, _files, _tables

if TYPE_CHECKING:
    from collections.abc import Iterator


class Parquet(_tables.TableSource):
    """Parquet tables, read by row group."""

    format_name = "Parquet"
    part_name = "row group"

    def divide_file(self, file: _files.InputFile) -> Iterator[Piece]:
        """Yield one piece per row group."""
        import pyarrow.parquet as pq

        with _files.open_seekable(file.name) as location:
            metadata = pq.read_metadata(location)
        self.check_columns(file.name, metadata.schema.to_arrow_schema())
        version = _files.hash_stats([file])
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            compressed_bytes = sum(
                group.column(column).total_compressed_size for column in range(group.num_columns)
            )
            label = f"{file.name} row group {index}"
            num_bytes = group.total_byte_size
            yield Piece(label, compressed_bytes, num_bytes, version, (file.name,), index, index + 1)

    def read_schema(self, name: str) -> Any:
        import pyarrow.parquet as pq

        with _files.open_seekable(name) as location:
            return pq.read_schema(location)

    def read_batches(self, piece: Piece) -> Iterator[tuple[int, Any]]:
        """Yield the batches of a row group."""
        import pyarrow.parquet as pq

        name = piece.files[0]
        with _files.open_seekable(name) as location, pq.ParquetFile(location) as file:
            columns = self.select_columns(file.schema_arrow)
            groups = [piece.start]
            for batch in file.iter_batches(_tables.ROWS_PER_BATCH, groups, columns=columns):
                yield piece.start, batch
