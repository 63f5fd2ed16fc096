"""CSV files (.csv, .tsv, .gz, .zst): one record per row."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pydantic import Field, model_validator

from regauge.data.sources import Piece, Record, Rejected, _files
from regauge.data.values import parse_float, parse_integer
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError
from regauge.system.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regauge.data.values import Value

COMMA, TAB = ",", "\t"
OTHER_DELIMITERS = (";", TAB, "|", COMMA)
"""Delimiters that a header of one column may have."""
TAB_SUFFIX = ".tsv"
"""Suffix of files whose values are separated by tabs; a suffix of compression may follow."""


class Csv(_files.FileSource):
    """Rows of text values; the columns of numbers are declared."""

    peer_names: ClassVar[tuple[str, ...]] = ("tsv", "table")

    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    """Separator of values; by default a tab in .tsv files, else a comma."""
    quote: str = Field(default='"', max_length=1)
    """Quote character; if it is empty, nothing is quoted and large files are read in parts."""
    column_names: tuple[str, ...] = ()
    """Names of the columns; by default they are in the first line."""
    columns: tuple[str, ...] = ()
    """Columns to read; by default all."""
    integers: tuple[str, ...] = ()
    """Columns with integers."""
    floats: tuple[str, ...] = ()
    """Columns with real numbers."""
    na_values: tuple[str, ...] = ("",)
    """Texts that mean a missing value."""
    chunk_mib: int = Field(default=8, ge=1)
    """Piece size in MiB."""

    @model_validator(mode="after")
    def _check_delimiter_and_columns(self) -> Csv:
        if self.delimiter in {self.quote, "\n", "\r"}:
            raise ValueError(f"invalid delimiter {self.delimiter!r}; choose another character")
        for name in (*self.integers, *self.floats):
            if name in self.integers and name in self.floats:
                raise ValueError(f"'{name}' is in integers and in floats; remove it from one")
            if self.columns and name not in self.columns:
                raise ValueError(f"the number column '{name}' is not in columns; add it")
        return self

    def field_names(self) -> tuple[str, ...]:
        return self.columns or self.column_names

    def divide_files(self, files: list[_files.InputFile]) -> tuple[Piece, ...]:
        """Group small files; divide large uncompressed ones if nothing is quoted."""
        first = files[0].name
        header = self._read_header(self._read_rows(first))
        if not isinstance(header, Rejected):
            self._check_delimiter(first, header)
            self._locate_columns(first, header)
        return _files.group_files(files, self.chunk_mib * MIB, is_divisible=not self.quote)

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield a record or a rejection for each row."""
        for name in piece.files:
            rows = self._read_rows(name, piece.start, piece.stop)
            header = self._read_header(self._read_rows(name) if piece.start else rows)
            if isinstance(header, Rejected):
                yield header
                continue
            columns = self._locate_columns(name, header)
            for row in rows:
                if isinstance(row, Rejected):
                    yield row
                elif row.values:
                    yield self._build_record(name, row, columns, len(header))

    def _read_header(self, rows: Iterator[_Row | Rejected]) -> tuple[str, ...] | Rejected:
        if self.column_names:
            return self.column_names
        first = next(rows, None)
        if isinstance(first, Rejected):
            return first
        return tuple(first.values) if first else ()

    def _check_delimiter(self, name: str, header: tuple[str, ...]) -> None:
        """Raise DataError if a header is JSON, or looks separated by another character."""
        if header and header[0].lstrip().startswith(("{", "[{")):
            problem = f"{name} begins with '{header[0][:20]}', which looks like JSON"
            raise DataError(problem, 'set source.kind = "jsonl"')
        if self.delimiter is not None or self.column_names or len(header) != 1:
            return
        counts = {character: header[0].count(character) for character in OTHER_DELIMITERS}
        delimiter = max(counts, key=lambda character: counts[character])
        if counts[delimiter]:
            shown = json.dumps(delimiter)
            raise DataError(
                f"{name} has one column, '{header[0]}', which looks separated by {shown}",
                f"set source.delimiter = {shown}, or to {json.dumps(COMMA)} if it is one column",
            )

    def _locate_columns(self, name: str, header: tuple[str, ...]) -> list[_Column]:
        """Return the positions of the selected columns; raises DataError if one does not exist."""
        if not header:
            return []
        for column in (*self.columns, *self.integers, *self.floats):
            if column not in header:
                remedy = did_you_mean(column, header)
                raise DataError(f"{name} has no column '{column}'", remedy)
        selected = [column for column in header if column in (self.columns or header)]
        for column in selected:
            if header.count(column) > 1:
                remedy = "set source.column_names to distinct names"
                raise DataError(f"{name} has {header.count(column)} columns '{column}'", remedy)
        parsers = dict.fromkeys(self.integers, parse_integer) | dict.fromkeys(
            self.floats, parse_float
        )
        return [_Column(column, header.index(column), parsers.get(column)) for column in selected]

    def _build_record(
        self, name: str, row: _Row, columns: list[_Column], width: int
    ) -> Record | Rejected:
        if len(row.values) != width:
            detail = f"{len(row.values)} for {width} columns"
            return Rejected(name, row.location, "wrong number of values", detail)
        fields: dict[str, Value] = {}
        for column in columns:
            value = row.values[column.position]
            if value not in self.na_values:
                try:
                    fields[column.name] = column.parse(value) if column.parse else value
                except ValueError:
                    return Rejected(name, row.location, f"no number in '{column.name}'", value[:80])
        return Record(name, row.location, fields)

    def _read_rows(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> Iterator[_Row | Rejected]:
        """Yield the rows of a file, or of a part; a line that cannot be read ends its row."""
        csv.field_size_limit(_files.MAX_LINE_BYTES)  # of this whole process; by default 128 KiB
        default = TAB if TAB_SUFFIX in Path(name).suffixes else COMMA
        feed = _LineFeed(_files.read_file_lines(name, start, stop))
        while not feed.is_finished:
            reader = csv.reader(
                feed,
                delimiter=self.delimiter or default,
                quotechar=self.quote or None,
                quoting=csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE,
                strict=True,
            )
            yield from _parse_rows(name, reader, feed)


class _Column(NamedTuple):
    """A column to read; without a parser it has texts."""

    name: str
    position: int
    parse: Callable[[str], Value] | None


class _Row(NamedTuple):
    """The values of a row and its location; an empty line gives none."""

    location: str
    values: list[str]


class _LineFeed:
    """The lines that the CSV parser reads, up to the next one that cannot be read."""

    def __init__(self, lines: Iterator[_files.TextLine | Rejected]) -> None:
        self._lines = lines
        self.is_finished = False
        self.rejected: Rejected | None = None
        self.locations: list[str] = []
        """Locations of the first and the last line of the current row."""

    def __iter__(self) -> _LineFeed:
        return self

    def __next__(self) -> str:
        if self.rejected:
            raise StopIteration
        line = next(self._lines, None)
        if line is None or isinstance(line, Rejected):
            self.is_finished, self.rejected = line is None, line
            raise StopIteration
        self.locations = [*self.locations[:1], line.location]
        # Invalid UTF-8 becomes lone surrogates, which are rejected for every source.
        return line.data.decode(errors="surrogateescape") + "\n"


def _parse_rows(
    name: str, reader: Iterator[list[str]], feed: _LineFeed
) -> Iterator[_Row | Rejected]:
    while True:
        feed.locations = []
        try:
            values = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            first, last = feed.locations[0], feed.locations[-1]
            until = f", up to {last}" if last != first else ""
            yield Rejected(name, first, "malformed CSV", f"{error}{until}")
        else:
            yield _Row(feed.locations[0], values)
    if feed.rejected:
        yield feed.rejected
        feed.rejected = None
