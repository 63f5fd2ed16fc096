"""Parts of benchmark sections: tables with text cells, latencies and prices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.run_folders import formatting

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from regauge.evaluation.report.charts import Chart

Document = dict[str, Any]
Row = dict[str, str]
PERCENTILES = (50, 90, 95, 99)
"""Latency percentiles in benchmark documents and tables."""
ARTIFACT = "artifact"


@dataclass(frozen=True)
class ReportTable:
    """One formatted table: heading -> cell in each row."""

    title: str
    rows: tuple[Row, ...]
    wide_columns: tuple[str, ...] = ()
    """Columns too wide for a terminal."""

    @property
    def terminal_rows(self) -> list[Row]:
        """Rows without the wide columns, and without the name of a single artifact."""
        has_one_artifact = len({row.get(ARTIFACT) for row in self.rows}) == 1
        is_redundant = has_one_artifact and len(self.rows) > 1
        dropped = {*self.wide_columns, *([ARTIFACT] if is_redundant else [])}
        return [
            {name: cell for name, cell in row.items() if name not in dropped} for row in self.rows
        ]


@dataclass(frozen=True)
class BenchmarkSection:
    title: str
    tables: tuple[ReportTable, ...]
    summary: tuple[str, ...]
    """The most important results in sentences."""
    sentences: tuple[str, ...]
    """Method, formulas and sources."""
    document: Document
    charts: tuple[Chart, ...]


def build_tables(
    title: str, rows: Iterable[Row], wide_columns: tuple[str, ...] = ()
) -> Iterator[ReportTable]:
    """Yield a table if it has rows."""
    if cells := tuple(rows):
        yield ReportTable(title, cells, wide_columns)


def format_milliseconds(value: float | None) -> str:
    """Return a latency with three digits: 0.42, 8.31, 72.9, 343, 1,204."""
    if value is None:
        return formatting.UNKNOWN
    for minimum, decimals in ((100, 0), (10, 1)):
        if round(value, decimals) >= minimum:
            return f"{value:,.{decimals}f}"
    return f"{value:.2f}"


def format_latencies(figures: Mapping[str, Any]) -> Row:
    """Return a cell per percentile; `dropped` and `unknown` are different."""
    percent_lost = 100 * (figures.get("dropped_fraction") or 0.0)
    cells = {}
    for percent in PERCENTILES:
        value = figures[f"p{percent}_ms"]
        is_lost = value is None and percent_lost > 100 - percent
        cells[f"p{percent} ms"] = "dropped" if is_lost else format_milliseconds(value)
    return cells


def format_load(fraction: float | None) -> str:
    """Return an open-loop load: a fraction of another rate, or a fixed rate."""
    return "fixed" if fraction is None else f"{fraction:.0%}"


def format_price(price: Mapping[str, Any]) -> str:
    """Return a price with its source and date."""
    date = f", {price['as_of']}" if price["as_of"] else ""
    return f"{price['usd_per_hour']:g} USD per hour ({price['source']}{date})"
