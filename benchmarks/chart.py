"""Write the benchmark results as a chart and as a table of docs/explanation/performance.md.

    python benchmarks/chart.py [--results FOLDER] [--chart FILE] [--page FILE]

Results that do not exist yet are left out. The table replaces the text between two markers of the
page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from recording import RESULTS

CHART, PAGE = Path("docs/explanation/benchmarks.svg"), Path("docs/explanation/performance.md")
MARKERS = "<!-- benchmarks: by benchmarks/chart.py -->", "<!-- end of benchmarks -->"
LANGUAGE_MODELS = {"train_mlm": "BERT pre-training", "train_clm": "Llama pre-training"}
WORKLOADS = {
    "train_contrastive": "contrastive training",
    "train_rank": "ranker training",
    "train_classify": "classifier of short texts",
    "prepare_peers": "dataset preparation",
    "predict": "batch inference, MiniLM, documentation",
    "predict_encyclopedia": "batch inference, MiniLM, encyclopedia",
    "serve": "serving, MiniLM, 64 connections",
}
VARIANTS = {
    "equal records together": "exact duplicates grouped",
    "near-duplicates together": "near-duplicates grouped",
}
BAR, GAP, LEFT, WIDTH, RIGHT = 16, 10, 420, 340, 60
"""Sizes in the chart, in pixels."""
FONT = "font-family='system-ui, sans-serif' font-size='12'"
CAPTION = "bar: median speedup · line: range · red mark: goal · dashed line: equal speed"


class Comparison(NamedTuple):
    """The speedup of Regauge over a peer in one workload."""

    workload: str
    peer: str
    speedup: float
    range: tuple[float, float]
    goal: float | None

    @property
    def verdict(self) -> str:
        """The goal, and whether it is met; empty if there is no goal."""
        if self.goal is None:
            return ""
        return f"{self.goal:g}, {'met' if self.speedup >= self.goal else '**not met**'}"


def main() -> None:
    """Write the chart, and write the table into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--chart", type=Path, default=CHART)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    results = {
        name: json.loads(path.read_text())
        for name in (*LANGUAGE_MODELS, *WORKLOADS)
        if (path := options.results / f"{name}.json").exists()
    }
    comparisons = list(list_comparisons(results))
    machines = sorted({f"{result['date']}, {result['machine']}" for result in results.values()})
    options.chart.write_text(build_chart(comparisons))
    page = options.page.read_text()
    before, begin, rest = page.partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not (begin and end):
        raise SystemExit(f"{options.page} lacks the line {MARKERS[0]} or {MARKERS[1]}")
    table = build_table(comparisons, machines)
    options.page.write_text(f"{before}{begin}\n{table}\n{end}{after}")


def list_comparisons(results: dict[str, dict[str, Any]]) -> Iterator[Comparison]:
    """Yield the comparisons of all results."""
    for name, result in results.items():
        for figures in result.get("workloads", [result]):
            workload = WORKLOADS.get(name) or _name_workload(LANGUAGE_MODELS[name], figures)
            variant = figures.get("variant")
            workload += f", {VARIANTS.get(variant, variant)}" if variant else ""
            for peer, values in figures["peers"].items():
                low, high = values["range"]
                speedup, goal = values["speedup"], values.get("goal")
                yield Comparison(workload, peer, speedup, (low, high), goal)


def _name_workload(model: str, figures: dict[str, Any]) -> str:
    dropout = f", dropout {figures['dropout']:g}" if figures["dropout"] else ""
    return f"{model}, {figures['length']} tokens{dropout}"


def build_table(comparisons: list[Comparison], machines: list[str]) -> str:
    """Return the comparisons in Markdown."""
    rows = [
        f"| {item.workload} | {item.peer} | {item.speedup:.2f} "
        f"| {item.range[0]:.2f} to {item.range[1]:.2f} | {item.verdict} |"
        for item in comparisons
    ]
    head = [
        "| workload | compared with | speedup | range | goal |",
        "| --- | --- | --- | --- | --- |",
    ]
    return "\n".join(["", *head, *rows, "", f"Measured: {'; '.join(machines)}.", ""])


def build_chart(comparisons: list[Comparison]) -> str:
    """Return the comparisons as an SVG image, with one bar each."""
    longest = max([1.0, *(max(item.range[1], item.goal or 0) for item in comparisons)])
    height = (BAR + GAP) * (len(comparisons) + 1) + 2 * GAP

    def x(speedup: float) -> float:
        return LEFT + WIDTH * speedup / longest

    bottom = height - BAR - GAP
    parts = [_line(x(1), 0, x(1), bottom, "#777", dashes="3")]
    for index, item in enumerate(comparisons):
        top = GAP + index * (BAR + GAP)
        middle, low, high = top + BAR / 2, x(item.range[0]), x(item.range[1])
        text_x, width = max(high, x(item.goal or 0)) + 6, x(item.speedup) - LEFT
        label = escape(f"{item.workload} vs {item.peer}")
        parts += [
            f"<text x='{LEFT - 8}' y='{middle + 4}' text-anchor='end' {FONT}>{label}</text>",
            f"<rect x='{LEFT}' y='{top}' width='{width:.1f}' height='{BAR}' fill='#4a7fb5'/>",
            _line(low, middle, high, middle, "#1d3f63"),
            f"<text x='{text_x:.1f}' y='{middle + 4}' {FONT}>{item.speedup:.2f}</text>",
        ]
        if item.goal is not None:
            parts.append(_line(x(item.goal), top - 2, x(item.goal), top + BAR + 2, "#c2410c"))
    caption = f"<text x='{LEFT + WIDTH}' y='{height - GAP}' text-anchor='end' fill='#555' {FONT}>"
    parts.append(f"{caption}{CAPTION}</text>")
    size = f"width='{LEFT + WIDTH + RIGHT}' height='{height}'"
    title = f"<title>Speedup of Regauge over its peers; {CAPTION}</title>"
    background = "<rect width='100%' height='100%' fill='white'/>"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' role='img' {size}>"
    return "\n".join([head, title, background, *parts, "</svg>", ""])


def _line(x1: float, y1: float, x2: float, y2: float, color: str, *, dashes: str = "") -> str:
    ends = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    dashed = f" stroke-dasharray='{dashes}'" if dashes else ""
    return f"<line {ends} stroke='{color}' stroke-width='2'{dashed}/>"


if __name__ == "__main__":
    main()
