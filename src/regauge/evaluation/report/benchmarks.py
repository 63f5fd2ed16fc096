"""Files that accompany a benchmark document (CSV, chart), and its tables for a terminal."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

from regauge.evaluation.report import inference_section, scaling_section, serving_section
from regauge.run_folders import formatting
from regauge.system.files import open_in_place, write_atomic
from regauge.system.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from regauge.evaluation.report.inference_section import Document, InferenceSection
    from regauge.evaluation.report.serving_section import ServingSection

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
SERVING_KEYS = (
    "concurrency",
    "texts_per_request",
    "arrivals",
    "load_fraction",
    "rate",
    "num_requests",
    "requests_per_second",
    "texts_per_second",
    "p50_ms",
    "p90_ms",
    "p95_ms",
    "p99_ms",
    "max_ms",
    "goodput_fraction",
    "dropped_fraction",
)
"""Keys of a load of a server that its CSV line has."""
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
    serving = serving_section.build_serving_section(document)
    if serving is not None:
        write_lines(folder / TABLE_FILE, list(_build_serving_lines(document)))
        _write_serving_chart(folder / CHART_FILE, serving)
        return _build_answer(serving)
    inference = inference_section.build_inference_section(document)
    if inference is None:
        return {}
    write_table(folder / TABLE_FILE, document)
    _write_chart(folder / CHART_FILE, inference)
    return _build_answer(inference)


def _build_answer(section: InferenceSection | ServingSection) -> dict[str, Any]:
    """Return the tables and texts of a section for a terminal."""
    tables = {table.title: table.terminal_rows for table in section.tables}
    summary = {"summary": list(section.summary)} if section.summary else {}
    return {**tables, **summary, "method": list(section.sentences)}


def write_table(path: Path, document: Document) -> None:
    """Write one CSV line per artifact, batch size, input length and load.

    An unknown value is `unknown`; a value that this kind of load does not have is empty.
    """
    write_lines(path, list(_build_lines(document)))


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write lines with equal columns as a CSV file."""
    with open(path, "w", newline="", encoding="utf-8", opener=open_in_place) as file:
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
    from regauge.evaluation.report.drawing import ChartContext, build_standalone_svg
    from regauge.evaluation.report.inference_charts import build_throughput_chart

    (chart,) = build_throughput_chart(inference, ChartContext("benchmark", inference.title))
    write_atomic(path, build_standalone_svg(chart.svg))


def _build_serving_lines(document: Document) -> Iterator[dict[str, Any]]:
    """Yield one CSV line per load of a server."""
    loads = [("closed_loop", row) for row in document["closed_loop"]]
    loads += [("open_loop", row) for row in document["open_loop"]]
    loads += [("saturation", row) for row in (document["saturation"] or {}).get("trials", ())]
    for load, row in loads:
        line = {"load": load, **{key: row.get(key, "") for key in SERVING_KEYS}}
        line |= {
            "status_429": row["statuses"].get("429", 0),
            "client_processor_share": row["generator"]["processor_share"],
            "client_kept_up": row["generator"]["kept_up"],
        }
        yield {key: formatting.UNKNOWN if value is None else value for key, value in line.items()}


def _write_serving_chart(path: Path, serving: ServingSection) -> None:
    from regauge.evaluation.report.drawing import ChartContext, build_standalone_svg

    context = ChartContext("benchmark", serving.title)
    for chart in serving_section.build_latency_chart(serving, context):
        write_atomic(path, build_standalone_svg(chart.svg))
