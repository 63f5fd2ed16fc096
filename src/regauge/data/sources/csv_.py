"""CSV files (.csv, .tsv, .gz, .zst): one record per row."""

from __future__ import annotations

import csv
import json
from collections import deque
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
QUOTE = '"'
MAX_ENCLOSED_ROWS = 8
"""Maximum lines of a row if each of its inner lines has the delimiters of a row; a quotation mark
that encloses more is a text's own."""
TAB_SUFFIX = ".tsv"
"""Suffix of files whose values are separated by tabs; a suffix of compression may follow."""


class Csv(_files.FileSource):
    """Rows of text values; the columns of numbers are declared."""

    peer_names: ClassVar[tuple[str, ...]] = ("tsv", "table")

    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    """Separator of values; by default a tab in .tsv files, else a comma."""
    quote: str | None = Field(default=None, max_length=1)
    """Quote character; by default `"`, or none if tabs separate the values and the first line is
    not quoted. If it is empty, nothing is quoted and large files are read in parts."""
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
        if self.delimiter in {QUOTE if self.quote is None else self.quote, "\n", "\r"}:
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
        is_divisible = not any(self._find_dialect(file.name)[1] for file in files)
        return _files.group_files(files, self.chunk_mib * MIB, is_divisible=is_divisible)

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
        """Yield the rows of a file, or of a part."""
        csv.field_size_limit(_files.MAX_LINE_BYTES)  # of this whole process; by default 128 KiB
        delimiter, quote = self._find_dialect(name)
        feed = _LineFeed(_files.read_file_lines(name, start, stop))
        reader = csv.reader(
            feed,
            delimiter=delimiter,
            quotechar=quote or None,
            quoting=csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE,
            strict=True,
        )
        return _parse_rows(name, reader, feed, delimiter.encode())

    def _find_dialect(self, name: str) -> tuple[str, str]:
        """Return the delimiter and the quote character of a file."""
        default = TAB if TAB_SUFFIX in Path(name).suffixes else COMMA
        delimiter = self.delimiter or default
        if self.quote is not None:
            return delimiter, self.quote
        return delimiter, "" if delimiter == TAB and not _has_quoted_header(name) else QUOTE


def _has_quoted_header(name: str) -> bool:
    """Return whether a value in the first line of a tab-separated file is quoted."""
    first = next(_files.read_file_lines(name), None)
    values = first.data.decode(errors="replace") if isinstance(first, _files.TextLine) else ""
    return any(value[:1] == QUOTE == value[1:][-1:] for value in values.split(TAB))


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
        self._returned: deque[_files.TextLine | Rejected] = deque()
        self.rejected: Rejected | None = None
        self.row: list[_files.TextLine] = []
        """Lines of the current row."""

    def __iter__(self) -> _LineFeed:
        return self

    def __next__(self) -> str:
        line = self._returned.popleft() if self._returned else next(self._lines, None)
        if isinstance(line, Rejected):
            self.rejected = line
        if line is None or isinstance(line, Rejected):
            raise StopIteration
        self.row.append(line)
        # Invalid UTF-8 becomes lone surrogates, which are rejected for every source.
        return line.data.decode(errors="surrogateescape") + "\n"

    def reject_first_line(self, name: str, problem: str) -> Rejected:
        """Return a rejection of the current row's first line; the others are read again."""
        rejected = [] if self.rejected is None else [self.rejected]
        self._returned.extendleft(reversed([*self.row[1:], *rejected]))
        self.rejected = None
        until = f" in {self.row[-1].location}" if len(self.row) > 1 else ""
        return Rejected(name, self.row[0].location, "malformed CSV", f"{problem}{until}")


def _parse_rows(
    name: str, reader: Iterator[list[str]], feed: _LineFeed, delimiter: bytes
) -> Iterator[_Row | Rejected]:
    """Yield rows and rejections; a quotation mark that encloses whole rows rejects its line."""
    while True:
        feed.row = []
        try:
            values = next(reader)
        except csv.Error as error:
            yield feed.reject_first_line(name, str(error))
        except StopIteration:
            if feed.rejected is None:
                return
            yield feed.rejected
            feed.rejected = None
        else:
            counts = {line.data.count(delimiter) for line in feed.row[1:-1]}
            if len(feed.row) > MAX_ENCLOSED_ROWS and counts == {len(values) - 1} != {0}:
                yield feed.reject_first_line(name, "the quotation mark encloses rows, ends")
            else:
                yield _Row(feed.row[0].location, values)
