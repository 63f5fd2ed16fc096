"""The first records of a data file: its source table, its fields and the lengths of its texts."""

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
"""Records of a file that are inspected."""
DELIMITERS = ",;\t|"
"""Separators of values that are recognized in a CSV file."""
_SAMPLE_BYTES = 1 << 16
LENGTH_QUANTILE = 0.99
"""Share of the texts of a field that are not longer than its length."""


class FieldSummary(NamedTuple):
    """The values of a field in the inspected records."""

    values: list[Value]
    """Values in the order of the records; records without the field have none."""

    @property
    def is_text(self) -> bool:
        """Whether all values are texts."""
        return all(isinstance(value, str) for value in self.values)

    @property
    def num_distinct(self) -> int:
        """Number of different values."""
        return len(set(map(str, self.values)))

    @property
    def num_tokens(self) -> int:
        """Estimated tokens of a long text of the field: the quantile `LENGTH_QUANTILE`."""
        lengths = sorted(estimate_tokens(str(value)) for value in self.values)
        return lengths[min(int(LENGTH_QUANTILE * len(lengths)), len(lengths) - 1)]


class DataFile(NamedTuple):
    """A data file with its first records."""

    source: dict[str, Any]
    """The table `source` that reads the file."""
    num_records: int
    """Number of inspected records."""
    is_complete: bool
    """Whether these are all records of the file."""
    fields: dict[str, FieldSummary]
    """The fields, in the order of their first appearance."""


def estimate_tokens(text: str) -> int:
    """Return an estimate of the tokens of a text, without special tokens.

    A word has about 1.4 tokens of a byte-pair vocabulary. Text without spaces has one in 4 bytes.
    """
    return math.ceil(max(1.4 * len(text.split()), len(text.encode(errors="replace")) / 4.5))


def read_data_file(path: Path) -> DataFile:
    """Read the first records of a file.

    Raises SettingsError if the suffix of the file is unknown, and DataError if it has no record.
    """
    table = describe_source(path)
    source: Source = config.parse_choice("data/sources", table)
    records = list(islice(_read_records(source), MAX_RECORDS + 1))
    if not records:
        raise DataError(f"{path} has no record", "name a file with records")
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


def describe_source(path: Path) -> dict[str, Any]:
    """Return the table `source` that reads a file; the delimiter of a CSV file is recognized.

    Raises SettingsError for an unknown suffix, or if there is no such file.
    """
    if not path.is_file():
        raise SettingsError(f"{path} is not a file", "correct --data")
    table = build_source_table(str(path))
    table.pop("document", None)
    if table["kind"] == "csv" and (delimiter := find_delimiter(path)) is not None:
        table["delimiter"] = delimiter
    return table


def find_delimiter(path: Path) -> str | None:
    """Return the delimiter of a CSV file; None if it is the default of its suffix."""
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
    """Yield the records of a source; raises DataError if the first item is rejected."""
    is_first = True
    for piece in source.list_pieces():
        for item in source.read(piece):
            if isinstance(item, Record):
                yield item
            elif is_first and isinstance(item, Rejected):
                problem = f"{item.file}, {item.location}: {item.reason}"
                raise DataError(problem, "correct the file, or name another one")
            is_first = False
