"""Charts of a run as SVG text that a page can hold: drawn by matplotlib, coloured by the page.

Every chart is readable without colour (line styles and markers), takes its colours and its font
from the page it is in, and tells a screen reader what it shows.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from regauge.reporting import words
from regauge.reporting.series import Series, smoothed, thinned

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.axes import Axes

    from regauge.reporting.runs import Run

POINTS = 400
"""More points than this cannot be told apart at the size of a chart."""

_COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--rule)",
    "#040404": "var(--series-1)",
    "#050505": "var(--series-2)",
    "#060606": "var(--series-3)",
    "#070707": "var(--series-4)",
    "#080808": "var(--series-5)",
}
"""Colours nobody draws with, and what the page puts in their place."""

_INK, _MUTED, _RULE, *_SERIES = _COLOURS
_STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (6, 1, 1, 1)), "v"))

_RC: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "regauge",
    "font.size": 10.5,
    "axes.edgecolor": _RULE,
    "axes.labelcolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _RULE,
    "ytick.color": _RULE,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.columnspacing": 1.2,
    "legend.handletextpad": 0.5,
    "legend.borderaxespad": 0.2,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}

_SVG = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"


@dataclass(frozen=True)
class Chart:
    """A drawing with its caption."""

    title: str
    text: str
    """What it shows, in a sentence."""
    svg: str


@dataclass(frozen=True)
class _Line:
    label: str
    series: Series
    look: str
    """`raw` is thin and pale, `mean` solid, `points` marked."""


def charts(run: Run, key: str) -> tuple[Chart, ...]:
    """Return the charts of a run; `key` keeps ids apart where a page has several runs."""
    drawn = [
        *_of(run, key, "Loss", _loss(run.series)),
        *_of(run, key, "Held-out metrics", _measured(run.series)),
        *_of(run, key, "Real tokens per second", _mean(run.series, "train/tokens_per_second")),
        *_of(run, key, "Learning rate", _plain(run.series, "train/learning_rate")),
        *_of(run, key, "Gradient norm", _mean(run.series, "train/gradient_norm")),
    ]
    return tuple(drawn)


def _of(run: Run, key: str, title: str, lines: list[_Line]) -> list[Chart]:
    """Draw lines where there is something to see: two points at least."""
    lines = [line for line in lines if len(line.series) > 1]
    if not lines:
        return []
    if len(lines) == 1 and lines[0].look == "points":
        title = f"{title}: {lines[0].label}"
    text = " ".join(_told(line) for line in lines if line.look != "raw" or len(lines) == 1)
    name = re.sub(r"[^a-z0-9]+", "-", f"{key}-{title}".lower())
    return [Chart(title, text, _embeddable(_drawn(lines), name, f"{title} of {run.name}", text))]


def _told(line: _Line) -> str:
    values = [value for _, value in line.series]
    (first, start), (last, end) = line.series[0], line.series[-1]
    return (
        f"{line.label}: {words.change(start, end)} between steps {first:,} and {last:,}, "
        f"smallest {words.number(min(values))}, largest {words.number(max(values))}."
    )


def _loss(series: dict[str, Series]) -> list[_Line]:
    heldout = [
        _Line(name.removesuffix("/loss"), points, "points")
        for name, points in series.items()
        if name.endswith("/loss") and not name.startswith("train/")
    ]
    train = [replace(line, label=f"train, {line.label}") for line in _mean(series, "train/loss")]
    return [*train, *heldout]


def _measured(series: dict[str, Series]) -> list[_Line]:
    """Return the held-out metrics that share an axis from 0 to 1, at most one for each style."""
    found = [
        _Line(name, points, "points")
        for name, points in series.items()
        if not name.startswith("train/") and all(0 <= value <= 1 for _, value in points)
    ]
    return [line for line in found if not line.label.endswith("/loss")][: len(_STYLES)]


def _mean(series: dict[str, Series], name: str) -> list[_Line]:
    points = series.get(name, ())
    if len(points) < 8:  # noqa: PLR2004  (too few to have noise)
        return _plain(series, name)
    return [_Line("as logged", points, "raw"), _Line("smoothed", smoothed(points), "mean")]


def _plain(series: dict[str, Series], name: str) -> list[_Line]:
    return [_Line(name.rpartition("/")[2].replace("_", " "), series.get(name, ()), "mean")]


def _drawn(lines: Iterable[_Line]) -> str:
    with mpl.rc_context(_RC):
        figure = Figure(figsize=(5.0, 2.9), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        looks = cycle(zip(_SERIES, _STYLES, strict=True))
        for line in lines:
            _draw(axes, line, None if line.look == "raw" else next(looks))
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(_tick))
        handles, _ = axes.get_legend_handles_labels()
        if len(handles) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 1.0), ncols=3)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()


def _tick(value: float, _place: int | None) -> str:
    """Return a tick's label: 12k, 2.5, 5e-04."""
    if abs(value) >= 1000:  # noqa: PLR2004  (k, M, B)
        return re.sub(r"\.0+(?=\D)", "", words.count(value))
    if 0 < abs(value) < 0.001:  # noqa: PLR2004  (more zeros than can be counted at a glance)
        return f"{value:.1e}".replace(".0e", "e")
    return f"{value:g}"


def _draw(axes: Axes, line: _Line, look: tuple[str, Any] | None) -> None:
    steps, values = zip(*thinned(line.series, POINTS), strict=True)
    if look is None:
        axes.plot(steps, values, color=_MUTED, linewidth=0.7, alpha=0.5, label=line.label)
        return
    colour, (dashes, marker) = look
    marks = {"marker": marker, "markerfacecolor": "none"} if line.look == "points" else {}
    axes.plot(steps, values, color=colour, linestyle=dashes, label=line.label, **marks)


def _embeddable(svg: str, name: str, title: str, text: str) -> str:
    """Return an SVG with its own ids, the page's colours, and words for a screen reader."""
    ET.register_namespace("", _SVG)
    root = ET.fromstring(svg)  # noqa: S314  (drawn just above, not input)
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    _own_ids(root, name)
    for tag, words_ in (("desc", text), ("title", title)):
        element = ET.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{tag}"})
        element.text = words_
        root.insert(0, element)
    for size in ("width", "height"):
        del root.attrib[size]
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title {name}-desc"}
    result = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", ET.tostring(root, "unicode"))
    return re.sub("|".join(_COLOURS), lambda found: _COLOURS[found[0]], result)


def _own_ids(root: ET.Element, name: str) -> None:
    """Keep the ids that something refers to, and make them the chart's own."""
    text = ET.tostring(root, "unicode")
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
    new = {old: f"{name}-{place}" for place, old in enumerate(sorted(used))}
    for element in root.iter():
        if (old := element.attrib.pop("id", None)) in new:
            element.attrib["id"] = new[old]
        if reference := element.attrib.pop(_HREF, None):
            element.attrib["href"] = "#" + new[reference[1:]]
        for key, value in element.attrib.items():
            element.attrib[key] = re.sub(
                r"url\(#([^)]+)\)", lambda at: f"url(#{new[at[1]]})", value
            )
