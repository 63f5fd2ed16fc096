"""Sections of all benchmark documents, and the CSV file and chart next to a document."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

from regauge.evaluation.report import inference_section, serving_section
from regauge.evaluation.report.benchmark_section import PERCENTILES, BenchmarkSection, ReportTable
from regauge.evaluation.report.charts import AxisScale, chart_scaling
from regauge.run_folders import formatting
from regauge.system.files import open_in_place, write_atomic
from regauge.system.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from regauge.evaluation.report.benchmark_section import Document, Row
    from regauge.run_folders.run_folder import RunFolder

TABLE_FILE, CHART_FILE = "benchmark.csv", "benchmark.svg"
CHART_TITLES = (inference_section.THROUGHPUT_TITLE, serving_section.LATENCY_TITLE)
"""Title prefixes of charts written to a file."""
ARTIFACT_KEYS = (
    "model",
    "backend",
    "precision",
    "quantization",
    "chip",
    "peak_memory_bytes",
    "date",
)
"""Artifact keys repeated in each CSV line."""
PERCENTILE_KEYS = tuple(f"p{percent}_ms" for percent in PERCENTILES)
FIGURE_KEYS = (
    *("load_fraction", "requests_per_second"),
    *PERCENTILE_KEYS,
    *("dropped_fraction", "inferences_per_second", "tokens_per_second", "flops_per_inference"),
    *("peak_fraction", "joules_per_inference", "joules_method", "usd_per_million_inferences"),
)
"""Load keys in a CSV line."""
SERVING_KEYS = (
    *("concurrency", "texts_per_request", "arrivals", "load_fraction", "rate", "num_requests"),
    *("requests_per_second", "texts_per_second"),
    *PERCENTILE_KEYS,
    *("max_ms", "goodput_fraction", "dropped_fraction"),
)
"""Server load keys in a CSV line."""
WIDE_COLUMNS = ("learning rate", "range", "$ per 1M tokens")
"""Columns too wide for a terminal."""


def read_benchmark(path: Path) -> Document:
    """Return a benchmark document; raises DataError if the file is damaged."""
    return read_json(path, "set another output.folder")


def build_section(document: Document, name: str = "") -> BenchmarkSection | None:
    """Return a benchmark document's section; None without results or for another kind.

    `name` is the output folder's name, for the title.
    """
    builder = BUILDERS.get(document.get("kind", ""))
    return builder(document, name) if builder else None


def build_sections(runs: Iterable[RunFolder]) -> tuple[BenchmarkSection, ...]:
    """Return the benchmark sections of the runs, ordered by kind."""
    sections = [section for run in runs if (section := build_section(run.benchmark, run.name))]
    kinds = list(BUILDERS)
    return tuple(sorted(sections, key=lambda section: kinds.index(section.document["kind"])))


def write_benchmark_files(folder: Path, document: Document) -> dict[str, Any]:
    """Write the CSV file and the chart of an inference benchmark; return tables for a terminal.

    The answer has title -> table rows, the summary and the method.
    """
    section = build_section(document)
    if section is None:
        return {}
    tables = {table.title: table.terminal_rows for table in section.tables}
    if document["kind"] == "training":
        return {**tables, "method": section.sentences[0]}
    write_table(folder / TABLE_FILE, document)
    for chart in section.charts:
        if chart.title.startswith(CHART_TITLES):
            from regauge.evaluation.report.drawing import draw_file

            write_atomic(folder / CHART_FILE, draw_file(chart, section.title))
    summary = {"summary": list(section.summary)} if section.summary else {}
    return {**tables, **summary, "method": list(section.sentences)}


def write_table(path: Path, document: Document) -> None:
    """Write one CSV line per load in an inference or serving benchmark.

    An unknown value is `unknown`; a value that does not apply to the load is empty.
    """
    build_lines = _build_serving_lines if document["kind"] == "serving" else _build_inference_lines
    lines = [
        {key: formatting.UNKNOWN if value is None else value for key, value in line.items()}
        for line in build_lines(document)
    ]
    with open(path, "w", newline="", encoding="utf-8", opener=open_in_place) as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def _build_inference_lines(document: Document) -> Iterator[dict[str, Any]]:
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
        loads = [("closed_loop", row["closed_loop"])]
        loads += [("open_loop", figures) for figures in row["open_loop"]]
        for load, figures in loads:
            line = {**shared, "load": load, **{key: figures.get(key, "") for key in FIGURE_KEYS}}
            yield line if line["load_fraction"] is not None else {**line, "load_fraction": ""}


def _build_serving_lines(document: Document) -> Iterator[dict[str, Any]]:
    loads = [("closed_loop", row) for row in document["closed_loop"]]
    loads += [("open_loop", row) for row in document["open_loop"]]
    loads += [("saturation", row) for row in (document["saturation"] or {}).get("trials", ())]
    for load, row in loads:
        yield {
            "load": load,
            **{key: row.get(key, "") for key in SERVING_KEYS},
            "status_429": row["statuses"].get("429", 0),
            "client_processor_share": row["generator"]["processor_share"],
            "client_kept_up": row["generator"]["kept_up"],
        }


def _build_scaling_section(document: Document, name: str = "") -> BenchmarkSection | None:
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


BUILDERS: dict[str, Callable[[Document, str], BenchmarkSection | None]] = {
    "training": _build_scaling_section,
    "inference": inference_section.build_section,
    "serving": serving_section.build_section,
}
"""Document kind -> section builder, in report order."""
