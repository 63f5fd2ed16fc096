"""Report section on a training benchmark: one row per process count, and a chart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.evaluation.report.benchmark_section import BenchmarkSection, ReportTable
from regauge.evaluation.report.charts import AxisScale, chart_scaling
from regauge.run_folders import formatting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.evaluation.report.benchmark_section import Document, Row

WIDE_COLUMNS = ("learning rate", "range", "$ per 1M tokens")
"""Columns too wide for a terminal."""


def build_section(document: Document, name: str = "") -> BenchmarkSection | None:
    """Return a training benchmark's section; None if it does not have rows.

    `name` is the output folder's name, for the title.
    """
    rows = document.get("rows", ())
    if not rows:
        return None
    title = f"{document['scaling'].capitalize()} scaling{' of ' if name else ''}{name}"
    table = ReportTable(title, tuple(map(_build_row, rows)), WIDE_COLUMNS)
    speeds = tuple((row["processes"], row["tokens_per_second"]) for row in rows)
    charts = chart_scaling(
        "Real tokens per second by number of processes",
        speeds,
        AxisScale(x="process", y="real tokens/s"),
    )
    return BenchmarkSection(
        title, (table,), (), (_describe_method(document),), document, tuple(charts)
    )


def _build_row(row: Mapping[str, Any]) -> Row:
    low, high = row["tokens_per_second_range"]
    return {
        "processes": row["name"],
        "batch": f"{row['global_batch_size']:,}",
        "learning rate": f"{row['learning_rate']:g}",
        "sequences/s": f"{row['sequences_per_second']:,.4g}",
        "tokens/s": f"{row['tokens_per_second']:,.0f}",
        "range": f"{low:,.0f} to {high:,.0f}",
        "efficiency": formatting.percent(row["efficiency"]),
        "MFU": formatting.percent(row["mfu"]),
        "s/step": f"{row['seconds_per_step']:.3g}",
        "$ per 1M tokens": formatting.dollars(row["usd_per_million_tokens"]),
    }


def _describe_method(document: Mapping[str, Any]) -> str:
    formulas, row = document["formulas"], document["rows"][-1]
    repeats = "one run" if document["repeats"] == 1 else f"{document['repeats']} runs"
    description = document["description"].capitalize()
    return (
        f"{description}. Medians of {repeats} of {document['steps']} steps, "
        f"{document['date']}, {row['chip']}; tokens exclude padding. "
        f"Sequences/s: {formulas['sequences_per_second']}. Efficiency: {formulas['efficiency']}. "
        f"MFU: {row['mfu_formula']}; peak: {row['peak_source']}."
    )
