"""The files of a benchmark beside its document, and its tables as they fit a terminal."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING, Any

from regauge.errors import SettingsError
from regauge.reporting import inference_section, scaling_section
from regauge.results import formatting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from regauge.reporting.inference_section import Document, Inferences

TABLE, CHART = "benchmark.csv", "benchmark.svg"
FACTS = ("model", "backend", "precision", "quantized", "chip", "memory_bytes", "date")
"""Of an artifact, in each of its rows."""
FIGURES = (
    "share",
    "requests_per_second",
    "p50_ms",
    "p90_ms",
    "p95_ms",
    "p99_ms",
    "not_served",
    "inferences_per_second",
    "tokens_per_second",
    "flops_per_inference",
    "peak_share",
    "joules_per_inference",
    "joules_are",
    "usd_per_million_inferences",
)
WIDE = ("learning rate", "from, to", "$ per 1M tokens")
"""Columns of scaling that a terminal has no room for."""


def read(path: Path) -> Document:
    """Return the document of a benchmark; raises SettingsError where it cannot be read."""
    try:
        document: Document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise SettingsError(f"{path} cannot be read", "set another output.folder") from None
    return document


def written(folder: Path, document: Document) -> dict[str, Any]:
    """Write what belongs beside a benchmark's document; return its tables for a terminal."""
    scaled = scaling_section.told(document)
    if scaled is not None:
        rows = [
            {name: cell for name, cell in row.items() if name not in WIDE} for row in scaled.rows
        ]
        return {scaled.title: rows, "how": scaled.sentence}
    found = inference_section.told(document)
    if found is None:
        return {}
    write_table(folder / TABLE, document)
    _write_chart(folder / CHART, found)
    tables = {table.title: table.narrow for table in found.tables}
    verdict = {"verdict": list(found.verdict)} if found.verdict else {}
    return {**tables, **verdict, "how": list(found.sentences)}


def write_table(path: Path, document: Document) -> None:
    """Write a line for each artifact, batch, length and load.

    What is unknown is that word; what is no figure of such a load is empty.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = list(_lines(document))
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def _lines(document: Document) -> Iterator[dict[str, Any]]:
    artifacts = {each["name"]: each for each in document["artifacts"]}
    for row in document["rows"]:
        own = artifacts[row["artifact"]]
        price = own["price"] or {"usd_per_hour": None}
        about = {
            "artifact": row["artifact"],
            **{name: own[name] for name in FACTS},
            "threads": own["machine"]["threads"],
            "ready_seconds": own["ready"]["seconds"],
            "usd_per_hour": price["usd_per_hour"],
            "batch": row["rows"],
            "length": row["length"],
        }
        loads = [("closed", row["closed"]), *(("open", each) for each in row["open"])]
        for load, figures in loads:
            line = {**about, "load": load, **{name: figures.get(name, "") for name in FIGURES}}
            if load == "closed" or figures["share"] is None:
                line["share"] = ""
            yield {
                key: formatting.UNKNOWN if value is None else value for key, value in line.items()
            }


def _write_chart(path: Path, found: Inferences) -> None:
    from regauge.reporting.drawing import Place, standing_alone
    from regauge.reporting.inference_charts import answered

    (chart,) = answered(found, Place("benchmark", found.title))
    path.write_text(standing_alone(chart.svg), encoding="utf-8")
