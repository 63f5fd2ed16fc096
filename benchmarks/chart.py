"""How many times as fast as its peers: the results as a chart and a table, for the README.

    python benchmarks/chart.py [--results FOLDER] [--chart FILE] [--readme FILE]

Reads what the benchmarks have written, whatever of it is there; what is no result yet has no bar.
The table stands in the README between two marks, and is written anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from recording import RESULTS

CHART = Path("docs/benchmarks.svg")
MARKS = "<!-- benchmarks: by benchmarks/chart.py -->", "<!-- end of benchmarks -->"
LANGUAGES = {"train_mlm": "BERT", "train_clm": "Llama"}
PAIRS = {
    "train_contrastive": "search encoder",
    "train_rank": "ranker",
    "prepare_peers": "text to tokens",
    "predict": "texts to vectors",
}
BAR, GAP, LEFT, WIDTH, RIGHT = 16, 10, 390, 340, 60
"""Of the chart, in pixels."""
FONT = "font-family='system-ui, sans-serif' font-size='12'"


class Bar(NamedTuple):
    """One comparison."""

    what: str
    peer: str
    times: float
    spread: tuple[float, float]
    goal: float | None

    @property
    def told(self) -> str:
        """What it has to be, and whether it is."""
        if self.goal is None:
            return ""
        return f"{self.goal:g}, {'met' if self.times >= self.goal else 'not met'}"


def main() -> None:
    """Draw the chart, and write the table into the README."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--chart", type=Path, default=CHART)
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    own = parser.parse_args()
    found = {
        name: json.loads(path.read_text())
        for name in (*LANGUAGES, *PAIRS)
        if (path := own.results / f"{name}.json").exists()
    }
    bars = list(compared(found))
    facts = sorted({f"{each['date']}, {each['machine']}" for each in found.values()})
    own.chart.write_text(drawn(bars))
    text = own.readme.read_text()
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    if not rest:
        raise SystemExit(f"{own.readme} has no line {MARKS[0]}")
    own.readme.write_text(f"{before}{MARKS[0]}\n{table(bars, facts)}\n{MARKS[1]}{after}")


def compared(found: dict[str, dict[str, Any]]) -> Iterator[Bar]:
    """Yield the comparisons of all results."""
    for name, result in found.items():
        for figures in result.get("measured", [result]):
            what = PAIRS.get(name) or _language(LANGUAGES[name], figures)
            what += f", {figures['beside']}" if "beside" in figures else ""
            for peer, each in figures["against"].items():
                least, most = each["spread"]
                named = peer.replace("trainer", "Trainer", 1) if name in LANGUAGES else peer
                yield Bar(what, named, each["times"], (least, most), each.get("goal"))


def _language(model: str, figures: dict[str, Any]) -> str:
    dropout = f", dropout {figures['dropout']:g}" if figures["dropout"] else ""
    return f"{model}, rows of {figures['length']}{dropout}"


def table(bars: list[Bar], facts: list[str]) -> str:
    """Return the comparisons in Markdown."""
    rows = [
        f"| {bar.what} | {bar.peer} | {bar.times:.2f} | {bar.spread[0]:.2f} to {bar.spread[1]:.2f} "
        f"| {bar.told} |"
        for bar in bars
    ]
    head = ["| what | beside | times as fast | spread | goal |", "| --- | --- | --- | --- | --- |"]
    return "\n".join(["", *head, *rows, "", f"({'; '.join(facts)}.)", ""])


def drawn(bars: list[Bar]) -> str:
    """Return the comparisons as an SVG: a bar each, its spread as a line, the goal as a mark."""
    most = max([1.0, *(max(bar.spread[1], bar.goal or 0) for bar in bars)])
    height = (BAR + GAP) * len(bars) + 2 * GAP

    def at(times: float) -> float:
        return LEFT + WIDTH * times / most

    parts = [_line(at(1), 0, at(1), height, "#777", dashes="3")]
    for number, bar in enumerate(bars):
        top = GAP + number * (BAR + GAP)
        middle, least, longest = top + BAR / 2, at(bar.spread[0]), at(bar.spread[1])
        wide = at(bar.times) - LEFT
        behind = max(longest, at(bar.goal or 0)) + 6
        label = escape(f"{bar.what}, {bar.peer}")
        parts += [
            f"<text x='{LEFT - 8}' y='{middle + 4}' text-anchor='end' {FONT}>{label}</text>",
            f"<rect x='{LEFT}' y='{top}' width='{wide:.1f}' height='{BAR}' fill='#4a7fb5'/>",
            _line(least, middle, longest, middle, "#1d3f63"),
            f"<text x='{behind:.1f}' y='{middle + 4}' {FONT}>{bar.times:.2f}</text>",
        ]
        if bar.goal is not None:
            parts.append(_line(at(bar.goal), top - 2, at(bar.goal), top + BAR + 2, "#c2410c"))
    size = f"width='{LEFT + WIDTH + RIGHT}' height='{height}'"
    title = "<title>Times as fast as the peer; the dashes are 1, the marks are goals</title>"
    paper = "<rect width='100%' height='100%' fill='white'/>"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' role='img' {size}>"
    return "\n".join([head, title, paper, *parts, "</svg>", ""])


def _line(x1: float, y1: float, x2: float, y2: float, color: str, *, dashes: str = "") -> str:
    places = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    dashed = f" stroke-dasharray='{dashes}'" if dashes else ""
    return f"<line {places} stroke='{color}' stroke-width='2'{dashed}/>"


if __name__ == "__main__":
    main()
