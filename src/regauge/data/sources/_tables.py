"""What sources of tables share: the columns that are fields, and rows as records."""

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

ROWS_AT_A_TIME = 1024
ASKED_AT_A_TIME = 8
"""Files whose index is read at the same time: elsewhere, an answer takes its time."""


class TableSource(_files.FileSource):
    """Files that say the names and types of their columns."""

    columns: tuple[str, ...] = ()
    """Columns to read; none given means every text and number column."""

    form: ClassVar[str]
    part: ClassVar[str]
    """What a file consists of, for people: it is numbered."""

    def fields(self) -> tuple[str, ...]:
        """Return the named columns, if any."""
        return self.columns

    def divide(self, found: list[_files.File]) -> tuple[Piece, ...]:
        """Return the pieces of every file; one that cannot be opened is one piece."""
        with ThreadPoolExecutor(ASKED_AT_A_TIME) as pool:
            return tuple(chain.from_iterable(pool.map(self._cut, found)))

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield the rows of a piece."""
        import pyarrow as pa

        name = piece.files[0]
        part, row = piece.start, 0
        try:
            for number, batch in self.batches(piece):
                part, row = number, row if number == part else 0
                for document in _documents(batch):
                    yield self._record(name, f"{self.part} {part} row {row}", document)
                    row += 1
        except _damage(pa) as error:
            place = f"{self.part} {part} from row {row}"
            why = str(error).partition("\n")[0]
            yield Rejected(name, place, f"damaged {self.form} file", why)

    def kinds(self, piece: Piece) -> dict[str, str]:
        """Return what the columns of the first batch are said to hold."""
        import pyarrow as pa

        try:
            first = next((batch for _, batch in self.batches(piece)), None)
        except _damage(pa):
            return {}
        schema = () if first is None else first.schema
        found = ((field.name, _kind(field.type)) for field in schema)
        return {name: kind for name, kind in found if kind is not None}

    @abstractmethod
    def cut(self, file: _files.File) -> Iterator[Piece]:
        """Yield the pieces of a file; raises what Arrow does where it cannot be opened."""

    @abstractmethod
    def batches(self, piece: Piece) -> Iterator[tuple[int, Any]]:
        """Yield the batches of a piece, each with the number of the part that it is of."""

    def chosen(self, name: str, schema: Any) -> list[str]:
        """Return the columns to read of a file; raises DataError for one that is not there."""
        import pyarrow.types as kinds

        for column in self.columns:
            if column not in schema.names:
                remedy = did_you_mean(column, schema.names)
                raise DataError(f"{name} has no column '{column}'", remedy)
        wanted = (
            kinds.is_string,
            kinds.is_large_string,
            kinds.is_string_view,
            kinds.is_dictionary,
            kinds.is_integer,
            kinds.is_floating,
            kinds.is_boolean,
        )
        usable = (field.name for field in schema if any(kind(field.type) for kind in wanted))
        return list(self.columns or usable)

    def _cut(self, file: _files.File) -> list[Piece]:
        import pyarrow as pa

        try:
            return list(self.cut(file))
        except (pa.ArrowInvalid, OSError):
            return [_files.whole(file)]

    def _record(
        self, name: str, place: str, document: dict[str, Any] | UnicodeDecodeError
    ) -> Record | Rejected:
        if isinstance(document, UnicodeDecodeError):
            return Rejected(name, place, "undecodable bytes", str(document))
        return Record(name, place, _values.usable(document, self.columns))


def _damage(arrow: Any) -> tuple[type[Exception], ...]:
    """Return what Arrow raises for files that are damaged, or of a kind that it does not know."""
    return arrow.ArrowInvalid, arrow.ArrowNotImplementedError, OSError


def _kind(type_: Any) -> str | None:
    """Return what values of a type of Arrow are, or None where their own tell."""
    import pyarrow.types as kinds

    if kinds.is_string(type_) or kinds.is_large_string(type_) or kinds.is_string_view(type_):
        return "text"
    if kinds.is_integer(type_) or kinds.is_boolean(type_):
        return "integer"
    return "real" if kinds.is_floating(type_) else None


def _documents(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """Yield the rows of a batch; one with undecodable bytes costs itself alone."""
    for at in range(0, batch.num_rows, ROWS_AT_A_TIME):
        some = batch.slice(at, ROWS_AT_A_TIME)
        try:
            yield from some.to_pylist()
        except UnicodeDecodeError:
            yield from (_document(some.slice(row, 1)) for row in range(some.num_rows))


def _document(batch: Any) -> dict[str, Any] | UnicodeDecodeError:
    try:
        (document,) = batch.to_pylist()
    except UnicodeDecodeError as error:
        return error
    return document  # type: ignore[no-any-return]
