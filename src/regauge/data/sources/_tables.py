"""Base of the sources of tables: selects columns and converts rows to records."""

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from regauge.choices import did_you_mean
from regauge.data.sources import Piece, Record, Rejected, _files, _values
from regauge.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS_PER_BATCH = 1024
OPEN_THREADS = 8
"""Number of files whose metadata is read at the same time, because remote reads have latency."""


class TableSource(_files.FileSource):
    """Files with named and typed columns."""

    columns: tuple[str, ...] = ()
    """Columns to read; by default all text and number columns."""

    format_name: ClassVar[str]
    """Name of the file format, for messages."""
    part_name: ClassVar[str]
    """Name of a part of a file, such as "row group", for locations."""

    def field_names(self) -> tuple[str, ...]:
        """Return the configured columns, if any."""
        return self.columns

    def divide_files(self, files: list[_files.InputFile]) -> tuple[Piece, ...]:
        """Return the pieces of all files; a file that cannot be opened is one piece."""
        with ThreadPoolExecutor(OPEN_THREADS) as pool:
            return tuple(chain.from_iterable(pool.map(self._divide_if_readable, files)))

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield the rows of a piece."""
        import pyarrow as pa

        name = piece.files[0]
        part, row = piece.start, 0
        try:
            for index, batch in self.read_batches(piece):
                part, row = index, row if index == part else 0
                for document in _read_documents(batch):
                    yield self._build_record(name, f"{self.part_name} {part} row {row}", document)
                    row += 1
        except _list_damage_errors(pa) as error:
            location = f"{self.part_name} {part} from row {row}"
            detail = str(error).partition("\n")[0]
            yield Rejected(name, location, f"damaged {self.format_name} file", detail)

    def field_kinds(self, piece: Piece) -> dict[str, str]:
        """Return the kinds of the columns from the schema of the first batch."""
        import pyarrow as pa

        try:
            first = next((batch for _, batch in self.read_batches(piece)), None)
        except _list_damage_errors(pa):
            return {}
        schema = () if first is None else first.schema
        kinds = ((field.name, _field_kind(field.type)) for field in schema)
        return {name: kind for name, kind in kinds if kind is not None}

    @abstractmethod
    def divide_file(self, file: _files.InputFile) -> Iterator[Piece]:
        """Yield the pieces of a file; raises Arrow's errors if it cannot be opened."""

    @abstractmethod
    def read_batches(self, piece: Piece) -> Iterator[tuple[int, Any]]:
        """Yield the batches of a piece, each with the index of its part."""

    def select_columns(self, name: str, schema: Any) -> list[str]:
        """Return the columns to read of a file; raises DataError if one does not exist."""
        from pyarrow import types

        for column in self.columns:
            if column not in schema.names:
                remedy = did_you_mean(column, schema.names)
                raise DataError(f"{name} has no column '{column}'", remedy)
        is_supported = (
            types.is_string,
            types.is_large_string,
            types.is_string_view,
            types.is_dictionary,
            types.is_integer,
            types.is_floating,
            types.is_boolean,
        )
        supported = (
            field.name for field in schema if any(check(field.type) for check in is_supported)
        )
        return list(self.columns or supported)

    def _divide_if_readable(self, file: _files.InputFile) -> list[Piece]:
        import pyarrow as pa

        try:
            return list(self.divide_file(file))
        except (pa.ArrowInvalid, OSError):
            return [_files.build_piece(file)]

    def _build_record(
        self, name: str, location: str, document: dict[str, Any] | UnicodeDecodeError
    ) -> Record | Rejected:
        if isinstance(document, UnicodeDecodeError):
            return Rejected(name, location, "undecodable bytes", str(document))
        return Record(name, location, _values.select_values(document, self.columns))


def _list_damage_errors(arrow: Any) -> tuple[type[Exception], ...]:
    """Return the exception types that Arrow raises for damaged files and unknown formats."""
    return arrow.ArrowInvalid, arrow.ArrowNotImplementedError, OSError


def _field_kind(arrow_type: Any) -> str | None:
    """Return the kind of the values of an Arrow type; None if only the values determine it."""
    from pyarrow import types

    if (
        types.is_string(arrow_type)
        or types.is_large_string(arrow_type)
        or types.is_string_view(arrow_type)
    ):
        return "text"
    if types.is_integer(arrow_type) or types.is_boolean(arrow_type):
        return "integer"
    return "float" if types.is_floating(arrow_type) else None


def _read_documents(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """Yield the rows of a batch; undecodable bytes reject only their own row."""
    for start in range(0, batch.num_rows, ROWS_PER_BATCH):
        rows = batch.slice(start, ROWS_PER_BATCH)
        try:
            yield from rows.to_pylist()
        except UnicodeDecodeError:
            yield from (_read_document(rows.slice(row, 1)) for row in range(rows.num_rows))


def _read_document(batch: Any) -> dict[str, Any] | UnicodeDecodeError:
    try:
        (document,) = batch.to_pylist()
    except UnicodeDecodeError as error:
        return error
    return document  # type: ignore[no-any-return]
