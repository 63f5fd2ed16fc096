"""A benchmark of training in words: a row for each number of processes, and a chart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.results import formatting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.reporting.drawing import Chart, Place

Document = dict[str, Any]


@dataclass(frozen=True)
class Scaling:
    """One benchmark."""

    title: str
    rows: tuple[dict[str, str], ...]
    """The cells of each number of processes."""
    sentence: str
    """How it was measured."""
    document: Document


def told(document: Document, name: str = "") -> Scaling | None:
    """Return what a benchmark of training says, None where it is none; `name` is its folder's."""
    if "scaling" not in document or not document.get("rows"):
        return None
    title = f"{document['scaling'].capitalize()} scaling{' of ' if name else ''}{name}"
    return Scaling(title, tuple(map(_row, document["rows"])), _sentence(document), document)


def _row(row: Mapping[str, Any]) -> dict[str, str]:
    low, high = row["spread"]
    return {
        "processes": row["name"],
        "batch": f"{row['global_batch']:,}",
        "learning rate": f"{row['learning_rate']:g}",
        "sequences/s": f"{row['sequences_per_second']:,.4g}",
        "tokens/s": f"{row['tokens_per_second']:,.0f}",
        "from, to": f"{low:,.0f}, {high:,.0f}",
        "efficiency": formatting.share(row["efficiency"]),
        "MFU": formatting.share(row["mfu"]),
        "s a step": f"{row['seconds_per_step']:.3g}",
        "$ per 1M tokens": formatting.dollars(row["usd_per_million_tokens"]),
    }


def _sentence(document: Mapping[str, Any]) -> str:
    formulas, row = document["formulas"], document["rows"][-1]
    turns = "one turn" if document["turns"] == 1 else f"{document['turns']} turns"
    return (
        f"{document['meaning'].capitalize()}. Medians of {turns} of {document['steps']} steps, "
        f"{document['date']}, {row['chip']}; tokens are real ones. "
        f"Sequences/s: {formulas['sequences_per_second']}. Efficiency: {formulas['efficiency']}. "
        f"MFU: {row['mfu_formula']}; peak: {row['peak_source']}."
    )


def charts(scaling: Scaling, place: Place) -> list[Chart]:
    """Draw the tokens a second beside what they would be at full efficiency."""
    from regauge.reporting.drawing import Line, Scale, curves

    found = scaling.document["rows"]
    first = found[0]
    alone = first["tokens_per_second"] / first["processes"]
    measured = tuple((row["processes"], row["tokens_per_second"]) for row in found)
    ideal = tuple((row["processes"], alone * row["processes"]) for row in found)
    lines = [Line("measured", measured, "points"), Line("at full efficiency", ideal, "mean")]
    scale = Scale(x="process", y="real tokens/s")
    return curves("Real tokens per second by processes", lines, place, scale=scale)
