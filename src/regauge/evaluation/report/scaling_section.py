"""Section of a report on a training benchmark: one row per number of processes, and a chart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.run_folders import formatting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.evaluation.report.drawing import Chart, ChartContext

Document = dict[str, Any]


@dataclass(frozen=True)
class ScalingSection:
    """One benchmark of training, formatted."""

    title: str
    rows: tuple[dict[str, str], ...]
    """One row per number of processes: heading -> cell."""
    sentence: str
    """Method and formulas."""
    document: Document


def build_scaling_section(document: Document, name: str = "") -> ScalingSection | None:
    """Return the section of a training benchmark; None for any other document.

    `name` is the name of the output folder, for the title.
    """
    if document.get("kind") != "training" or not document.get("rows"):
        return None
    title = f"{document['scaling'].capitalize()} scaling{' of ' if name else ''}{name}"
    rows = tuple(map(_build_row, document["rows"]))
    return ScalingSection(title, rows, _describe_method(document), document)


def _build_row(row: Mapping[str, Any]) -> dict[str, str]:
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


def build_charts(scaling: ScalingSection, context: ChartContext) -> list[Chart]:
    """Draw the tokens per second by number of processes, and linear scaling for reference."""
    from regauge.evaluation.report.drawing import AxisScale, Curve, draw_curves

    rows = scaling.document["rows"]
    smallest = rows[0]
    per_process = smallest["tokens_per_second"] / smallest["processes"]
    measured = tuple((row["processes"], row["tokens_per_second"]) for row in rows)
    linear = tuple((row["processes"], per_process * row["processes"]) for row in rows)
    lines = [Curve("measured", measured, "points"), Curve("linear scaling", linear, "mean")]
    scale = AxisScale(x="process", y="real tokens/s")
    title = "Real tokens per second by number of processes"
    return draw_curves(title, lines, context, scale=scale)
