"""Files that accompany a benchmark document (CSV, chart), and its tables for a terminal."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

from regauge.files import open_in_place, write_atomic
from regauge.json_files import read_json
from regauge.reporting import inference_section, scaling_section
from regauge.results import formatting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from regauge.reporting.inference_section import Document, InferenceSection

TABLE_FILE, CHART_FILE = "benchmark.csv", "benchmark.svg"
ARTIFACT_KEYS = (
    "model",
    "backend",
    "precision",
    "quantization",
    "chip",
    "peak_memory_bytes",
    "date",
)
"""Keys of an artifact that each of its CSV lines repeats."""
FIGURE_KEYS = (
    "load_fraction",
    "requests_per_second",
    "p50_ms",
    "p90_ms",
    "p95_ms",
    "p99_ms",
    "dropped_fraction",
    "inferences_per_second",
    "tokens_per_second",
    "flops_per_inference",
    "peak_fraction",
    "joules_per_inference",
    "joules_method",
    "usd_per_million_inferences",
)
"""Keys of a load that its CSV line has."""
WIDE_COLUMNS = ("learning rate", "range", "$ per 1M tokens")
"""Columns of a scaling table that do not fit a terminal."""


def read_benchmark(path: Path) -> Document:
    """Return a benchmark document; raises DataError if the file is damaged."""
    return read_json(path, "set another output.folder")


def write_benchmark_files(folder: Path, document: Document) -> dict[str, Any]:
    """Write the CSV file and the chart of an inference benchmark; return tables for a terminal."""
    scaling = scaling_section.build_scaling_section(document)
    if scaling is not None:
        rows = [
            {name: cell for name, cell in row.items() if name not in WIDE_COLUMNS}
            for row in scaling.rows
        ]
        return {scaling.title: rows, "method": scaling.sentence}
    inference = inference_section.build_inference_section(document)
    if inference is None:
        return {}
    write_table(folder / TABLE_FILE, document)
    _write_chart(folder / CHART_FILE, inference)
    tables = {table.title: table.terminal_rows for table in inference.tables}
    summary = {"summary": list(inference.summary)} if inference.summary else {}
    return {**tables, **summary, "method": list(inference.sentences)}


def write_table(path: Path, document: Document) -> None:
    """Write one CSV line per artifact, batch size, input length and load.

    An unknown value is `unknown`; a value that this kind of load does not have is empty.
    """
    with open(path, "w", newline="", encoding="utf-8", opener=open_in_place) as file:
        lines = list(_build_lines(document))
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def _build_lines(document: Document) -> Iterator[dict[str, Any]]:
    artifacts = {artifact["name"]: artifact for artifact in document["artifacts"]}
    for row in document["rows"]:
        artifact = artifacts[row["artifact"]]
        price = artifact["price"] or {"usd_per_hour": None}
        shared = {
            "artifact": row["artifact"],
            **{key: artifact[key] for key in ARTIFACT_KEYS},
            "threads": artifact["machine"]["threads"],
            "startup_seconds": artifact["startup"]["total_seconds"],
            "usd_per_hour": price["usd_per_hour"],
            "batch_size": row["batch_size"],
            "input_length": row["input_length"],
        }
        loads = [
            ("closed_loop", row["closed_loop"]),
            *(("open_loop", figures) for figures in row["open_loop"]),
        ]
        for load, figures in loads:
            line = {**shared, "load": load, **{key: figures.get(key, "") for key in FIGURE_KEYS}}
            if load == "closed_loop" or figures["load_fraction"] is None:
                line["load_fraction"] = ""
            yield {
                key: formatting.UNKNOWN if value is None else value for key, value in line.items()
            }


def _write_chart(path: Path, inference: InferenceSection) -> None:
    from regauge.reporting.drawing import ChartContext, build_standalone_svg
    from regauge.reporting.inference_charts import build_throughput_chart

    (chart,) = build_throughput_chart(inference, ChartContext("benchmark", inference.title))
    write_atomic(path, build_standalone_svg(chart.svg))
