"""Reads users' catalog files, checks columns and units, and stores the rows.

A column name contains its unit. A file with another unit is refused with the right column, since a
silent conversion is how a price per month becomes a price per hour.
"""

from __future__ import annotations

import csv
import datetime as dt
import io
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from regauge.machines.catalog import (
    CHIPS,
    INSTANCES,
    PRICES,
    find_user_folder,
    forget_catalog,
    load_chips,
    load_instances,
)
from regauge.system.choices import did_you_mean
from regauge.system.errors import SettingsError
from regauge.system.files import LOCK, hold_lock, read_csv_rows, write_atomic

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from regauge.machines.catalog import CatalogPrice


class Quantity(NamedTuple):
    """A column's unit and plausible values."""

    unit: str
    minimum: float
    maximum: float
    conversion: str
    """How other units become this one."""


RATE = Quantity("TFLOP/s", 0.01, 1e5, "1 PFLOP/s = 1000 TFLOP/s, 1 TFLOP/s = 1e12 FLOP/s")
MEMORY = Quantity("GB", 1, 4096, "1 GiB = 1.073741824 GB, 1 TB = 1000 GB")
BANDWIDTH = Quantity("GB/s", 1, 1e5, "1 TB/s = 1000 GB/s, 8 Gbit/s = 1 GB/s")
NETWORK = Quantity("Gbit/s", 0.1, 1e5, "1 GB/s = 8 Gbit/s, 1 Tbit/s = 1000 Gbit/s")
HOST_MEMORY = Quantity("GiB", 0.5, 1e5, "1 GB = 0.931323 GiB, 1 TiB = 1024 GiB")
POWER = Quantity("W", 1, 1e4, "1 kW = 1000 W")
PRICE = Quantity("USD/h", 1e-4, 5e3, "a price per second x 3600, a price per month / 730")
COUNT = Quantity("a count", 1, 1e4, "write a whole number")


@dataclass(frozen=True)
class Table:
    """The columns in one kind of catalog file."""

    file: str
    key: tuple[str, ...]
    """Columns that identify a row."""
    required: tuple[str, ...]
    columns: Mapping[str, Quantity | None]
    """All columns; None for a text or a date."""


RATES = ("bf16", "fp16", "fp32", "tf32", "fp8", "measured_bf16", "measured_fp8")
TABLES = {
    "chips": Table(
        CHIPS,
        ("name",),
        ("name", "vendor", "memory_gb", "source"),
        {
            **dict.fromkeys(("name", "vendor", "link", "source", "notes")),
            **{f"{name}_teraflops": RATE for name in RATES},
            "int8_teraops": RATE,
            "memory_gb": MEMORY,
            "bandwidth_gb_per_s": BANDWIDTH,
            "link_gb_per_s": BANDWIDTH,
            "tdp_watts": POWER,
        },
    ),
    "instances": Table(
        INSTANCES,
        ("name",),
        ("name", "chip", "chips", "source"),
        {
            **dict.fromkeys(("name", "chip", "as_of", "source", "notes")),
            **dict.fromkeys(("chips", "vcpus"), COUNT),
            "memory_gib": HOST_MEMORY,
            "network_gbit_per_s": NETWORK,
            "usd_per_hour": PRICE,
        },
    ),
    "prices": Table(
        PRICES,
        ("instance", "as_of"),
        ("instance", "as_of", "usd_per_hour", "source"),
        {
            **dict.fromkeys(("instance", "as_of", "source", "region", "market", "notes")),
            "usd_per_hour": PRICE,
        },
    ),
}
LOCK_SECONDS = 60.0
"""Longest wait for another process that changes the catalog."""
WHOLE_NUMBERS = frozenset({"chips", "vcpus", "memory_gib"})
UNIT_WORDS = frozenset(
    {
        *("b", "kb", "mb", "gb", "tb", "kib", "mib", "gib", "tib"),
        *("kbit", "mbit", "gbit", "tbit", "mbps", "gbps", "tbps", "gbs"),
        *("per", "s", "sec", "second", "seconds", "min", "minute", "h", "hr", "hour", "hours"),
        *("day", "month", "year", "w", "kw", "watt", "watts", "kilowatts"),
        *("flops", "gflops", "tflops", "pflops", "gigaflops", "teraflops", "petaflops"),
        *("ops", "tops", "teraops", "usd", "eur", "gbp", "cent", "cents", "dollars"),
    }
)
"""Words in a column name that name its unit."""


def import_file(path: Path) -> dict[str, object]:
    """Check a CSV file with chips, instances or prices and add its rows to the user's catalog.

    The columns decide the file's kind. Returns the kind, the row count, the names and the written
    file. Raises SettingsError with the line and the right name or unit.
    """
    kind, rows = _read_table(path)
    table = TABLES[kind]
    for number, row in enumerate(rows, start=2):
        check_row(table, row, f"{path}, line {number}")
    _check_unique(table, rows, path)
    names = sorted({row[table.key[0]] for row in rows})
    return {
        "kind": kind,
        "num_rows": len(rows),
        "names": names,
        "file": str(store_rows(table, rows)),
    }


def store_prices(prices: Sequence[CatalogPrice]) -> Path:
    """Add prices to the user's catalog and return the file."""
    rows = [
        {
            "instance": price.instance,
            "as_of": price.as_of.isoformat(),
            "usd_per_hour": f"{price.usd_per_hour:g}",
            "source": price.source,
            "region": price.region,
        }
        for price in prices
    ]
    return store_rows(TABLES["prices"], rows)


def store_rows(table: Table, rows: Sequence[Mapping[str, str]]) -> Path:
    """Write rows to the user's file for a table; a row replaces the stored row with its key."""
    path = find_user_folder() / table.file
    path.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(path.parent / LOCK, LOCK_SECONDS):
        stored = read_csv_rows(path) if path.is_file() else []
        merged = {tuple(row[name] for name in table.key): row for row in (*stored, *rows)}
        text = io.StringIO()
        writer = csv.DictWriter(text, list(table.columns), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged.values())
        write_atomic(path, text.getvalue())
    forget_catalog()
    return path


def _read_table(path: Path) -> tuple[str, list[dict[str, str]]]:
    """Return a file's kind and rows; raises SettingsError for other columns."""
    try:
        rows = read_csv_rows(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        remedy = "name a CSV file in UTF-8 with a header line"
        raise SettingsError(f"{path} cannot be read: {error}", remedy) from None
    if not rows:
        raise SettingsError(f"{path} has no rows", f"write a header and rows: {_describe_kinds()}")
    columns = [name for name in rows[0] if name is not None]
    kind = max(TABLES, key=lambda name: _count_matches(TABLES[name], columns))
    _check_columns(TABLES[kind], columns, f"{path} ({kind})")
    return kind, [_clean_row(row, f"{path}, line {line}") for line, row in enumerate(rows, 2)]


def _count_matches(table: Table, columns: Sequence[str]) -> tuple[int, int]:
    """Return how well columns match a table: required columns first, then all."""
    return len({*table.required} & {*columns}), len({*table.columns} & {*columns})


def _describe_kinds() -> str:
    return "; ".join(f"{kind}: {', '.join(table.required)}" for kind, table in TABLES.items())


def _check_columns(table: Table, columns: Sequence[str], location: str) -> None:
    """Raise SettingsError for an unknown column, with the right unit, or for a missing one."""
    for column in columns:
        if column not in table.columns:
            problem = f"{location}: column '{column}' is unknown"
            raise SettingsError(problem, _find_remedy(table, column, columns))
    for name in table.required:
        if name not in columns:
            raise SettingsError(f"{location}: column '{name}' is missing", f"add '{name}'")


def _find_remedy(table: Table, column: str, columns: Sequence[str]) -> str:
    """Return the remedy for an unknown column: the column for the same quantity with its unit."""
    stem = _find_stem(column)
    for name, quantity in table.columns.items():
        if quantity is not None and name not in columns and _find_stem(name) == stem:
            return f"convert it to {quantity.unit} ({quantity.conversion}) and name it '{name}'"
    return did_you_mean(column, list(table.columns))


def _find_stem(column: str) -> tuple[str, ...]:
    words = re.split(r"[^a-z0-9]+", column.lower())
    return tuple(word for word in words if word and word not in UNIT_WORDS)


def _clean_row(row: Mapping[str, str], location: str) -> dict[str, str]:
    """Strip a row's cells; raises SettingsError for another length."""
    names, cells = list[object](row), list[object](row.values())
    if None in names or None in cells:  # csv stores the cells of a wrong length as None
        problem = f"{location} has {'more' if None in names else 'fewer'} cells than the header"
        raise SettingsError(problem, "quote cells that contain commas")
    return {name: cell.strip() for name, cell in row.items()}


def check_row(table: Table, row: Mapping[str, str], location: str) -> None:
    """Raise SettingsError if a row has an implausible number, a wrong date or an unknown name."""
    for name in table.required:
        if not row[name] and name != "chips":  # a machine type without accelerators has none
            raise SettingsError(f"{location}: '{name}' is empty", f"write the {name}")
    for name, cell in row.items():
        if cell and (quantity := table.columns[name]) is not None:
            is_whole = name in WHOLE_NUMBERS
            _check_number(cell, quantity, f"{location}: {name} = {cell}", is_whole=is_whole)
    _check_date(row.get("as_of", ""), location, has_price=bool(row.get("usd_per_hour")))
    if table.file == PRICES and row["instance"] not in load_instances():
        remedy = did_you_mean(row["instance"], list(load_instances()))
        raise SettingsError(f"{location}: '{row['instance']}' is not in the catalog", remedy)
    if table.file == INSTANCES and row["chips"] and row["chip"] not in load_chips():
        remedy = did_you_mean(row["chip"], list(load_chips()))
        raise SettingsError(f"{location}: chip '{row['chip']}' is not in the catalog", remedy)


def _check_number(cell: str, quantity: Quantity, location: str, *, is_whole: bool) -> None:
    try:
        value = float(cell)
    except ValueError:
        raise SettingsError(f"{location} is not a number", f"write it in {quantity.unit}") from None
    if not math.isfinite(value) or not quantity.minimum <= value <= quantity.maximum:
        bounds = f"{quantity.minimum:g} to {quantity.maximum:g} {quantity.unit}"
        problem = f"{location} is outside {bounds}"
        raise SettingsError(problem, f"convert it to {quantity.unit}: {quantity.conversion}")
    if is_whole and not cell.isdigit():
        raise SettingsError(f"{location} is not a whole number", "write digits only")


def _check_date(text: str, location: str, *, has_price: bool) -> None:
    """Raise SettingsError for a wrong date, a date in the future, or a price without a date."""
    if not text:
        if has_price:
            raise SettingsError(f"{location}: the price has no date", "set as_of to its date")
        return
    try:
        date = dt.date.fromisoformat(text)
    except ValueError:
        problem = f"{location}: as_of = {text} is not a date"
        raise SettingsError(problem, "write it as YYYY-MM-DD") from None
    if date > dt.datetime.now(dt.UTC).date():
        raise SettingsError(f"{location}: as_of = {text} is in the future", "correct the date")


def _check_unique(table: Table, rows: Sequence[Mapping[str, str]], path: Path) -> None:
    keys: set[tuple[str, ...]] = set()
    for line, row in enumerate(rows, start=2):
        key = tuple(row[name] for name in table.key)
        if key in keys:
            raise SettingsError(f"{path}, line {line} repeats {', '.join(key)}", "remove one")
        keys.add(key)
