"""Base of the sources of tables: selects columns and converts rows to records."""

from __future__ import annotations

import json
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from regauge.data.sources import UNDECODABLE, Piece, Record, Rejected, _files
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regauge.data.values import FieldKind

ROWS_PER_BATCH = 1024
OPEN_THREADS = 8
"""Number of files whose metadata is read at the same time, because remote reads have latency."""
INT64_DIGITS = 18
"""Every integer with this many decimal digits fits into 64 bits."""
FEATURES_KEY = b"huggingface"
"""Key of the schema's metadata in which the library `datasets` stores the types of columns."""
CLASS_LABEL = "ClassLabel"
"""The type of a feature with classes."""


class TableSource(_files.FileSource):
    """Files with named and typed columns."""

    columns: tuple[str, ...] = ()
    """Columns to read; by default all but those of binary data."""

    format_name: ClassVar[str]
    """Name of the file format, for messages."""
    part_name: ClassVar[str]
    """Name of a part of a file, such as "row group", for locations."""

    def field_names(self) -> tuple[str, ...]:
        return self.columns

    def divide_files(self, files: list[_files.InputFile]) -> tuple[Piece, ...]:
        """Return the pieces of all files; a file that cannot be opened is one piece."""
        with ThreadPoolExecutor(OPEN_THREADS) as pool:
            return tuple(chain.from_iterable(pool.map(self._divide_if_readable, files)))

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        import pyarrow as pa

        name = piece.files[0]
        part, row = piece.start, 0
        try:
            for index, batch in self.read_batches(piece):
                part, row = index, row if index == part else 0
                for document in _read_documents(_format_temporal(batch)):
                    yield self._build_record(name, f"{self.part_name} {part} row {row}", document)
                    row += 1
        except _list_damage_errors(pa) as error:
            location = f"{self.part_name} {part} from row {row}"
            detail = str(error).partition("\n")[0]
            yield Rejected(name, location, f"damaged {self.format_name} file", detail)

    def field_kinds(self, piece: Piece) -> dict[str, FieldKind]:
        """Return the kinds of the columns from the schema of the first batch."""
        import pyarrow as pa

        try:
            first = next((batch for _, batch in self.read_batches(piece)), None)
        except _list_damage_errors(pa):
            return {}
        fields = () if first is None else first.schema
        typed = (field for field in fields if not pa.types.is_null(field.type))
        kinds = ((field.name, _field_kind(field.type)) for field in typed)
        return {name: kind for name, kind in kinds if kind is not None}

    def class_names(self, piece: Piece) -> dict[str, tuple[str, ...]]:
        """Return the names of the features of type ClassLabel, which `datasets` has written."""
        import pyarrow as pa

        try:
            metadata = self.read_schema(piece.files[0]).metadata or {}
        except _list_damage_errors(pa):
            return {}
        features = _read_features(metadata.get(FEATURES_KEY, b"{}"))
        names = {field: find_names(feature) for field, feature in features.items()}
        return {field: texts for field, texts in names.items() if texts}

    @abstractmethod
    def read_schema(self, name: str) -> Any:
        """Return the Arrow schema of a file, with its metadata."""

    @abstractmethod
    def divide_file(self, file: _files.InputFile) -> Iterator[Piece]:
        """Yield the pieces of a file; raises Arrow's errors if it cannot be opened."""

    @abstractmethod
    def read_batches(self, piece: Piece) -> Iterator[tuple[int, Any]]:
        """Yield the batches of a piece, each with the index of its part."""

    def check_columns(self, name: str, schema: Any) -> None:
        """Raise DataError if a column cannot be read; log the columns that are left out."""
        for column in self.columns or schema.names:
            if schema.names.count(column) > 1:
                problem = f"{name} has {schema.names.count(column)} columns '{column}'"
                raise DataError(problem, "give them distinct names")
        kinds = {field.name: _field_kind(field.type) for field in schema}
        for column in self.columns:
            if column not in kinds:
                remedy = did_you_mean(column, schema.names)
                raise DataError(f"{name} has no column '{column}'", remedy)
            if kinds[column] is None:
                problem = f"{name}: column '{column}' has type {schema.field(column).type}"
                raise DataError(problem, "remove it from source.columns")
        for column, kind in kinds.items():
            if kind is None and not self.columns:
                _log_left_out(column, str(schema.field(column).type))

    def select_columns(self, schema: Any) -> list[str]:
        """Return the columns to read."""
        readable = (field.name for field in schema if _field_kind(field.type) is not None)
        return list(self.columns or readable)

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
            return Rejected(name, location, UNDECODABLE, str(document))
        return _files.build_record(name, location, document, self.columns)


def find_names(feature: Any) -> tuple[str, ...]:
    """Return the names of a ClassLabel or of a list of them; empty for other features.

    `feature` is as in a README (`dtype`) or as in the schema of a table (`_type`).
    """
    if isinstance(feature, list) and len(feature) == 1:
        return find_names(feature[0])
    if not isinstance(feature, dict):
        return ()
    if feature.get("_type") == CLASS_LABEL:
        return _sort_names(feature.get("names"))
    if isinstance(label := feature.get("class_label"), dict):
        return _sort_names(label.get("names"))
    inner = (feature.get(key) for key in ("dtype", "sequence", "list"))
    tables = (value for value in inner if isinstance(value, dict))
    return find_names(next(tables, feature.get("feature")))


def _sort_names(names: Any) -> tuple[str, ...]:
    """Return names, which are a list or a table by their numbers, in order."""
    if isinstance(names, dict) and all(str(number).isdecimal() for number in names):
        names = [names[number] for number in sorted(names, key=int)]
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _read_features(document: bytes) -> dict[str, Any]:
    """Return the features of a table by column; empty if the document describes none."""
    try:
        features = json.loads(document)["info"]["features"]
    except (ValueError, TypeError, LookupError):
        return {}
    return features if isinstance(features, dict) else {}


@cache
def _log_left_out(column: str, arrow_type: str) -> None:
    logger.warning("Column '%s' of type %s is left out: it has no text form", column, arrow_type)


def _list_damage_errors(arrow: Any) -> tuple[type[Exception], ...]:
    return arrow.ArrowInvalid, arrow.ArrowNotImplementedError, OSError


def _field_kind(arrow_type: Any) -> FieldKind | None:
    """Return the kind of the values of an Arrow type; None if it cannot be read."""
    from pyarrow import types

    if types.is_dictionary(arrow_type):
        return _field_kind(arrow_type.value_type)
    if types.is_decimal(arrow_type):
        is_integer = arrow_type.scale == 0 and arrow_type.precision <= INT64_DIGITS
        return "integer" if is_integer else "decimal"
    if types.is_nested(arrow_type) and not types.is_union(arrow_type):
        fields = (arrow_type.field(index) for index in range(arrow_type.num_fields))
        is_json = all(_field_kind(field.type) not in {None, "date", "decimal"} for field in fields)
        return "json" if is_json else None
    checks: dict[FieldKind, tuple[Callable[[Any], bool], ...]] = {
        "text": (types.is_string, types.is_large_string, types.is_string_view),
        "uint64": (types.is_uint64,),
        "integer": (types.is_integer,),
        "boolean": (types.is_boolean,),
        "float": (types.is_floating,),
        "date": (types.is_date, types.is_time, types.is_timestamp),
        "json": (types.is_null,),
    }
    matches = (kind for kind, tests in checks.items() if any(test(arrow_type) for test in tests))
    return next(matches, None)


def _format_temporal(batch: Any) -> Any:
    """Return a batch with dates and times as ISO 8601 texts; times with a zone are in UTC."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import types

    columns = []
    for column in batch.columns:
        if types.is_dictionary(column.type) and _field_kind(column.type) == "date":
            column = column.dictionary_decode()  # noqa: PLW2901
        if _field_kind(column.type) != "date":
            columns.append(column)
        elif types.is_timestamp(column.type):
            utc = column.cast(pa.timestamp(column.type.unit)).cast(pa.string())
            text = pc.replace_substring(utc, " ", "T")
            zone = "Z" if column.type.tz else ""
            columns.append(pc.binary_join_element_wise(text, zone, ""))
        else:
            columns.append(column.cast(pa.string()))
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


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
