"""CSV files (.csv, .tsv, .gz, .zst): one record per row, its columns are the fields."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field, model_validator

from regauge.choices import did_you_mean
from regauge.data.sources import Piece, Record, Rejected, Value, _files, _values
from regauge.errors import DataError
from regauge.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COMMA, TAB = ",", "\t"
TABS = ".tsv"
"""What the name of a file ends in that has tabs between its values, packed or not."""


class Csv(_files.FileSource):
    """Rows of values; all are texts but those of the columns that are declared as numbers."""

    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    """What is between two values; by default a tab in .tsv files, and else a comma."""
    quote: str = Field(default='"', max_length=1)
    """What encloses a value; empty where nothing does: then large files are read in parts."""
    names: tuple[str, ...] = ()
    """Names of the columns; none given means that the first line has them."""
    columns: tuple[str, ...] = ()
    """Columns to read; none given means all."""
    integers: tuple[str, ...] = ()
    """Columns that hold integers."""
    reals: tuple[str, ...] = ()
    """Columns that hold real numbers."""
    missing: tuple[str, ...] = ("",)
    """Values that stand for no value."""
    piece_mib: int = Field(default=8, ge=1)
    """Bytes that one process reads at a time."""

    @model_validator(mode="after")
    def _consistent(self) -> Csv:
        if self.delimiter in {self.quote, "\n", "\r"}:
            raise ValueError(f"{self.delimiter!r} cannot be between two values")
        for name in (*self.integers, *self.reals):
            if name in self.integers and name in self.reals:
                raise ValueError(f"'{name}' is both an integer and a real number")
            if self.columns and name not in self.columns:
                raise ValueError(f"'{name}' is a number and not among the columns")
        return self

    def fields(self) -> tuple[str, ...]:
        """Return the columns that are named, if any."""
        return self.columns or self.names

    def divide(self, found: list[_files.File]) -> tuple[Piece, ...]:
        """Return small files together; large plain ones in parts where nothing is quoted."""
        first = found[0].name
        header = self._header(self._rows(first))
        if not isinstance(header, Rejected):
            self._columns(first, header)
        return _files.group(found, self.piece_mib * MIB, divisible=not self.quote)

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield a record or a rejection for each row."""
        for name in piece.files:
            rows = self._rows(name, piece.start, piece.stop)
            header = self._header(self._rows(name) if piece.start else rows)
            if isinstance(header, Rejected):
                yield header
                continue
            columns = self._columns(name, header)
            for row in rows:
                if isinstance(row, Rejected):
                    yield row
                elif row.values:
                    yield self._record(name, row, columns, len(header))

    def _header(self, rows: Iterator[_Row | Rejected]) -> tuple[str, ...] | Rejected:
        """Return the names of the columns, taken from the first row if need be."""
        if self.names:
            return self.names
        first = next(rows, None)
        if isinstance(first, Rejected):
            return first
        return tuple(first.values) if first else ()

    def _columns(self, name: str, header: tuple[str, ...]) -> list[_Column]:
        """Return where the wanted columns are; raises DataError for one that is not there."""
        if not header:
            return []
        for column in (*self.columns, *self.integers, *self.reals):
            if column not in header:
                remedy = did_you_mean(column, header)
                raise DataError(f"{name} has no column '{column}'", remedy)
        wanted = [column for column in header if column in (self.columns or header)]
        for column in wanted:
            if header.count(column) > 1:
                remedy = "name the columns otherwise with source.names"
                raise DataError(f"{name} has {header.count(column)} columns '{column}'", remedy)
        kinds = dict.fromkeys(self.integers, _integer) | dict.fromkeys(self.reals, _real)
        return [_Column(column, header.index(column), kinds.get(column)) for column in wanted]

    def _record(
        self, name: str, row: _Row, columns: list[_Column], width: int
    ) -> Record | Rejected:
        if len(row.values) != width:
            detail = f"{len(row.values)} for {width} columns"
            return Rejected(name, row.place, "another number of values", detail)
        fields: dict[str, Value] = {}
        for column in columns:
            value = row.values[column.position]
            if value not in self.missing:
                try:
                    fields[column.name] = column.number(value) if column.number else value
                except ValueError:
                    return Rejected(name, row.place, f"no number in '{column.name}'", value[:80])
        return Record(name, row.place, fields)

    def _rows(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> Iterator[_Row | Rejected]:
        """Yield the rows of a file, or of a part; a line that cannot be read ends its row."""
        csv.field_size_limit(_files.LONGEST_LINE)  # of this whole process; by default 128 KiB
        usual = TAB if TABS in Path(name).suffixes else COMMA
        feed = _Feed(_files.lines_of(name, start, stop))
        while not feed.ended:
            reader = csv.reader(
                feed,
                delimiter=self.delimiter or usual,
                quotechar=self.quote or None,
                quoting=csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE,
                strict=True,
            )
            yield from _parsed(name, reader, feed)


class _Column(NamedTuple):
    """A column to read; one without a number holds texts."""

    name: str
    position: int
    number: Callable[[str], Value] | None


class _Row(NamedTuple):
    """The values of a row, none for an empty line, and where it begins."""

    place: str
    values: list[str]


class _Feed:
    """Lines as the parser takes them, up to the next one that cannot be read."""

    def __init__(self, lines: Iterator[_files.Line | Rejected]) -> None:
        self._lines = lines
        self.ended = False
        self.rejected: Rejected | None = None
        self.taken: list[str] = []
        """The places of the lines of a row."""

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        if self.rejected:
            raise StopIteration
        line = next(self._lines, None)
        if line is None or isinstance(line, Rejected):
            self.ended, self.rejected = line is None, line
            raise StopIteration
        self.taken = [*self.taken[:1], line.place]
        # What is no UTF-8 becomes what is no Unicode, and that is rejected for every source.
        return line.data.decode(errors="surrogateescape") + "\n"


def _parsed(name: str, reader: Iterator[list[str]], feed: _Feed) -> Iterator[_Row | Rejected]:
    while True:
        feed.taken = []
        try:
            values = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            first, last = feed.taken[0], feed.taken[-1]
            until = f", up to {last}" if last != first else ""
            yield Rejected(name, first, "malformed CSV", f"{error}{until}")
        else:
            yield _Row(feed.taken[0], values)
    if feed.rejected:
        yield feed.rejected
        feed.rejected = None


def _integer(value: str) -> int:
    number = int(value)
    if number not in _values.INTEGERS or "_" in value:
        raise ValueError
    return number


def _real(value: str) -> float:
    number = float(value)
    if number - number != 0 or "_" in value:  # infinite, or none
        raise ValueError
    return number
