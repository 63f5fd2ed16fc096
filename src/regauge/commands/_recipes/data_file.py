"""A data file's first records: source table, fields and text lengths."""

from __future__ import annotations

import csv
import math
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge import config
from regauge.data.sources import Record, Rejected
from regauge.data.sources._suffixes import build_source_table
from regauge.system.errors import DataError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.sources import Source
    from regauge.data.values import Value

MAX_RECORDS = 2000
"""Records inspected in a file."""
DELIMITERS = ",;\t|"
"""Recognized CSV separators."""
_SAMPLE_BYTES = 1 << 16
LENGTH_QUANTILE = 0.99
"""Share of a field's texts within the field's length."""


class FieldSummary(NamedTuple):
    """A field's values in the inspected records."""

    values: list[Value]

    @property
    def is_text(self) -> bool:
        """Whether all values are texts."""
        return all(isinstance(value, str) for value in self.values)

    @property
    def num_distinct(self) -> int:
        """Number of distinct values."""
        return len(set(map(str, self.values)))

    @property
    def num_tokens(self) -> int:
        """Estimated tokens in a long text of the field: the quantile `LENGTH_QUANTILE`."""
        lengths = sorted(estimate_tokens(str(value)) for value in self.values)
        return lengths[min(int(LENGTH_QUANTILE * len(lengths)), len(lengths) - 1)]


class DataFile(NamedTuple):
    source: dict[str, Any]
    """The `source` table for the file."""
    num_records: int
    """Inspected record count."""
    is_complete: bool
    """Whether these are all records in the file."""
    fields: dict[str, FieldSummary]
    """Fields in the order of their first appearance."""


def estimate_tokens(text: str) -> int:
    """Estimate a text's tokens, without special tokens.

    A word has about 1.4 byte-pair tokens. Text without spaces has one per 4 bytes.
    """
    return math.ceil(max(1.4 * len(text.split()), len(text.encode(errors="replace")) / 4.5))


def read_data_file(path: Path) -> DataFile:
    """Read a file's first records.

    Raises SettingsError for an unknown file suffix, and DataError without records.
    """
    table = describe_source(path)
    source: Source = config.parse_choice("data/sources", table)
    records = list(islice(_read_records(source), MAX_RECORDS + 1))
    if not records:
        raise DataError(f"{path} does not contain records", "name a file with records")
    values: dict[str, list[Value]] = {}
    for record in records[:MAX_RECORDS]:
        for name, value in record.fields.items():
            values.setdefault(name, []).append(value)
    return DataFile(
        table,
        min(len(records), MAX_RECORDS),
        len(records) <= MAX_RECORDS,
        {name: FieldSummary(column) for name, column in values.items()},
    )


def describe_source(path: Path, option: str = "--data") -> dict[str, Any]:
    """Return the `source` table that reads a file; a CSV file's delimiter is recognized.

    `option` is the option that names the file. Raises SettingsError for an unknown suffix or a
    missing file.
    """
    if not path.is_file():
        raise SettingsError(f"{path} is not a file", f"correct {option}")
    table = build_source_table(str(path))
    table.pop("document", None)
    if table["kind"] == "csv" and (delimiter := find_delimiter(path)) is not None:
        table["delimiter"] = delimiter
    return table


def find_delimiter(path: Path) -> str | None:
    """Return a CSV file's delimiter; None if it is the suffix's default."""
    if path.suffix not in (".csv", ".tsv"):
        return None
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        sample = file.read(_SAMPLE_BYTES)
    try:
        delimiter = csv.Sniffer().sniff(sample, DELIMITERS).delimiter
    except csv.Error:
        return None
    return None if delimiter == ("\t" if path.suffix == ".tsv" else ",") else delimiter


def _read_records(source: Source) -> Iterator[Record]:
    """Yield a source's records; raises DataError if the first item is rejected."""
    is_first = True
    for piece in source.list_pieces():
        for item in source.read(piece):
            if isinstance(item, Record):
                yield item
            elif is_first and isinstance(item, Rejected):
                problem = f"{item.file}, {item.location}: {item.reason}"
                raise DataError(problem, "correct the file, or name another one")
            is_first = False
