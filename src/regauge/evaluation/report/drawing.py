"""Charts as SVG text: drawn by matplotlib, coloured by the page that embeds them.

Line styles, markers and hatches make every chart readable without colour. Colours and font come
from the page. A title and a description serve screen readers.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from regauge.run_folders import formatting
from regauge.run_folders.series import Points, downsample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from matplotlib.axes import Axes

MAX_POINTS = 400
"""Most points of a drawn curve; more cannot be distinguished at the size of a chart."""
MAX_COUNTED_CLASSES = 12
"""Classes up to which the cells of a confusion matrix show their counts."""
MAX_CELL_ALPHA = 0.75
"""Opacity of a cell that holds all rows of its class; its count stays readable."""
MAX_DESCRIBED_CELLS = 5
"""Confusions that the description of a confusion matrix lists."""
MAX_NAME = 18
"""Characters of a class name on the axis of a confusion matrix."""
WIDTH, HEIGHT = 5.0, 2.9
"""Size of a chart in inches; a chart with many bars is taller."""

COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--rule)",
    "#040404": "var(--series-1)",
    "#050505": "var(--series-2)",
    "#060606": "var(--series-3)",
    "#070707": "var(--series-4)",
    "#080808": "var(--series-5)",
}
"""Placeholder colours that are drawn, and the CSS colour of the page that replaces each."""

_SVG = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"

_INK, _MUTED, _RULE, *_SERIES = COLOURS
_HATCHES = ("", "////", "....", "xxxx", "----")
STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (6, 1, 1, 1)), "v"))

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


COUNTED_UNITS = {"step": "steps", "process": "processes", "device": "devices"}
"""Units of an x axis that are whole numbers, with their plurals."""


@dataclass(frozen=True)
class Chart:
    """A chart with its caption."""

    title: str
    text: str
    """Description for screen readers."""
    svg: str


@dataclass(frozen=True)
class Curve:
    """A curve of a chart."""

    label: str
    points: Points
    style: str
    """`raw` is thin and pale, `mean` is solid, `points` has markers."""


@dataclass(frozen=True)
class Band:
    """An area between two curves."""

    label: str
    lower: Points
    upper: Points
    hatched: bool = False


@dataclass(frozen=True)
class ReferenceLine:
    """A horizontal line."""

    label: str
    value: float


@dataclass(frozen=True)
class Bar:
    """A stacked horizontal bar."""

    label: str
    pieces: tuple[tuple[str, float], ...]
    """(name, size) of each piece; equal names have equal looks within a chart."""


@dataclass(frozen=True)
class ChartContext:
    """The part of the page that a chart belongs to."""

    key: str
    """Prefix that makes ids unique in the page."""
    owner: str
    """Name of the run or benchmark, for screen readers."""


@dataclass(frozen=True)
class AxisScale:
    """Units and scale of the axes."""

    x: str = "step"
    y: str = ""
    logarithmic: bool = False
    """Whether the y axis is logarithmic; values of 0 and below are then not drawn."""


STEPS = AxisScale()


def draw_curves(
    title: str,
    curves: list[Curve],
    context: ChartContext,
    *,
    scale: AxisScale = STEPS,
    references: tuple[Band | ReferenceLine, ...] = (),
) -> list[Chart]:
    """Return a chart of the curves with two or more points; empty if there is none."""
    curves = [curve for curve in curves if len(curve.points) > 1]
    if not curves:
        return []
    if len(curves) == 1 and curves[0].style == "points":
        title = f"{title}: {curves[0].label}"
    text = " ".join(
        _describe_curve(curve, scale)
        for curve in curves
        if curve.style != "raw" or len(curves) == 1
    )
    return [
        _draw_chart(
            title, text, context, lambda axes: _plot_curves(axes, curves, scale, references)
        )
    ]


def draw_bars(title: str, bars: list[Bar], context: ChartContext, *, unit: str) -> list[Chart]:
    """Return a chart of horizontal bars; empty if there is no bar."""
    if not bars:
        return []
    text = " ".join(
        f"{bar.label}: "
        + ", ".join(f"{name} {formatting.number(float(size))}{unit}" for name, size in bar.pieces)
        + "."
        for bar in bars
    )
    height = max(HEIGHT, 0.8 + 0.24 * len(bars))
    return [_draw_chart(title, text, context, lambda axes: _plot_bars(axes, bars, unit), height)]


def draw_matrix(
    title: str, names: Sequence[str], cells: list[list[int]], context: ChartContext
) -> Chart:
    """Return a confusion matrix: a row for each actual class, a column for each predicted class.

    A cell is as dark as its share of the row. Counts are written into up to 12 x 12 cells.
    """
    count = len(names)
    confusions = [
        (cells[row][column], names[row], names[column])
        for row in range(count)
        for column in range(count)
        if row != column and cells[row][column]
    ]
    largest = sorted(confusions, key=lambda confusion: -confusion[0])[:MAX_DESCRIBED_CELLS]
    correct, total = sum(cells[row][row] for row in range(count)), sum(map(sum, cells))
    parts = [f"{correct:,} of {total:,} are correct."]
    parts += [
        f"{number:,} of {actual} are predicted as {name}." for number, actual, name in largest
    ]
    height = max(HEIGHT, 1.4 + 0.28 * count)
    plot = partial(_plot_matrix, names=names, cells=cells)
    return _draw_chart(title, " ".join(parts), context, plot, height)


def _plot_matrix(axes: Axes, names: Sequence[str], cells: list[list[int]]) -> None:
    count = len(names)
    for row, values in enumerate(cells):
        total = max(sum(values), 1)
        for column, value in enumerate(values):
            share = value / total
            area = Rectangle(
                (column - 0.5, row - 0.5),
                1,
                1,
                facecolor=_SERIES[0],
                alpha=0.75 * share,
                linewidth=0,
            )
            axes.add_patch(area)
            if count <= MAX_COUNTED_CLASSES:
                text = formatting.count(value) if value >= 10_000 else str(value)  # noqa: PLR2004  (fits a cell)
                axes.text(column, row, text, ha="center", va="center", fontsize=9, color=_INK)
    labels = [name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…" for name in names]
    axes.set_xticks(range(count), labels, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(count), labels)
    axes.set_xlim(-0.5, count - 0.5)
    axes.set_ylim(count - 0.5, -0.5)
    axes.grid(visible=False)
    axes.set_xlabel("predicted")
    axes.set_ylabel("actual")


def _describe_curve(curve: Curve, scale: AxisScale) -> str:
    values = [value for _, value in curve.points]
    (first, start), (last, end) = curve.points[0], curve.points[-1]
    interval = f"{COUNTED_UNITS.get(scale.x)} {first:,} and {last:,}"
    if scale.x not in COUNTED_UNITS:
        interval = (
            f"{formatting.number(float(first))} and {formatting.number(float(last))} {scale.x}"
        )
    return (
        f"{curve.label}: {formatting.change(start, end)} between {interval}, "
        f"smallest {formatting.number(min(values))}, largest {formatting.number(max(values))}."
    )


def _draw_chart(
    title: str,
    text: str,
    context: ChartContext,
    plot: Callable[[Axes], None],
    height: float = HEIGHT,
) -> Chart:
    with mpl.rc_context(_RC):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        plot(axes)
        handles, _ = axes.get_legend_handles_labels()
        if len(handles) > 1:
            _draw_legend(axes, figure)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    name = re.sub(r"[^a-z0-9]+", "-", f"{context.key}-{title}".lower())
    accessible_title = f"{title} of {context.owner}"
    return Chart(title, text, embed_svg(svg.getvalue(), name, accessible_title, text))


def _draw_legend(axes: Axes, figure: Figure) -> None:
    """Draw the legend above the axes, in as many columns as fit."""
    for columns in (3, 2, 1):
        legend = axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 1.0), ncols=columns)
        legend.set_in_layout(False)  # the axes would shrink for a legend that is too wide
        figure.draw_without_rendering()
        if legend.get_window_extent().x1 <= figure.bbox.x1:
            legend.set_in_layout(True)
            return


def _plot_curves(
    axes: Axes,
    curves: Iterable[Curve],
    scale: AxisScale,
    references: tuple[Band | ReferenceLine, ...],
) -> None:
    for reference in references:
        _plot_reference(axes, reference)
    looks = cycle(zip(_SERIES, STYLES, strict=True))
    for curve in curves:
        _plot_curve(axes, curve, None if curve.style == "raw" else next(looks))
    axes.set_xlabel(scale.x)
    if scale.y:
        axes.set_ylabel(scale.y)
    if scale.logarithmic:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(_format_tick))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=scale.x in COUNTED_UNITS))
    if scale.x not in COUNTED_UNITS:
        axes.xaxis.set_major_formatter(FuncFormatter(_format_tick))


def _plot_reference(axes: Axes, reference: Band | ReferenceLine) -> None:
    if isinstance(reference, ReferenceLine):
        axes.axhline(reference.value, color=_MUTED, linewidth=1.0, linestyle=(0, (1, 2)))
        axes.annotate(
            reference.label,
            (1.0, reference.value),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            color=_MUTED,
            fontsize=9,
        )
        return
    steps, lower = zip(*reference.lower, strict=True)
    upper = [value for _, value in reference.upper]
    look: dict[str, Any] = {"color": _RULE, "alpha": 0.7}
    if reference.hatched:
        look = {"hatch": "////", "edgecolor": _MUTED, "facecolor": "none"}
    axes.fill_between(steps, lower, upper, linewidth=0, label=reference.label, **look)


def _plot_bars(axes: Axes, bars: list[Bar], unit: str) -> None:
    names = list(dict.fromkeys(name for bar in bars for name, _ in bar.pieces))
    looks = list(zip(names, cycle(_SERIES), cycle(_HATCHES), strict=False))
    ends = [0.0] * len(bars)
    for name, colour, hatch in looks:
        rows = [row for row, bar in enumerate(bars) if name in dict(bar.pieces)]
        sizes = [dict(bars[row].pieces)[name] for row in rows]
        axes.barh(
            rows, sizes, left=[ends[row] for row in rows], height=0.6, label=name,
            facecolor="none", edgecolor=colour, hatch=hatch, linewidth=1.2,
        )  # fmt: skip
        for row, size in zip(rows, sizes, strict=True):
            ends[row] += size
    axes.set_yticks(list(range(len(bars))), [bar.label for bar in bars])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_xlabel(unit.strip())
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(_format_tick))


def _format_tick(value: float, _position: int | None) -> str:
    """Return the label of a tick: 12k, 2.5, 5e-04."""
    if abs(value) >= 1000:  # noqa: PLR2004  (k, M, B)
        return re.sub(r"\.0+(?=\D)", "", formatting.count(value))
    if 0 < abs(value) < 0.001:  # noqa: PLR2004  (too many zeros to count at a glance)
        return f"{value:.1e}".replace(".0e", "e")
    return f"{value:g}"


def _plot_curve(axes: Axes, curve: Curve, look: tuple[str, Any] | None) -> None:
    steps, values = zip(*downsample(curve.points, MAX_POINTS), strict=True)
    if look is None:
        axes.plot(steps, values, color=_MUTED, linewidth=0.7, alpha=0.5, label=curve.label)
        return
    colour, (dashes, marker) = look
    markers = {"marker": marker, "markerfacecolor": "none"} if curve.style == "points" else {}
    axes.plot(steps, values, color=colour, linestyle=dashes, label=curve.label, **markers)


def embed_svg(svg: str, name: str, title: str, text: str) -> str:
    """Return an SVG for a page: unique ids, the page's colours, a title and a description."""
    ET.register_namespace("", _SVG)
    root = ET.fromstring(svg)  # noqa: S314  (drawn just above, not input)
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    _make_ids_unique(root, name)
    for tag, content in (("desc", text), ("title", title)):
        element = ET.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{tag}"})
        element.text = content
        root.insert(0, element)
    for size in ("width", "height"):
        del root.attrib[size]
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title {name}-desc"}
    result = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", ET.tostring(root, "unicode"))
    return re.sub("|".join(COLOURS), lambda match: COLOURS[match[0]], result)


def build_standalone_svg(svg: str) -> str:
    """Return an SVG of `embed_svg` as a separate file, in the light colours of the page."""
    css = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    light = css.partition("@media")[0]
    colours = re.findall(r"--(?:paper|ink|muted|rule|series-\d): [^;]+;", light)
    style = f":root {{ {' '.join(colours)} font-family: system-ui, sans-serif; }}"
    background = '<rect width="100%" height="100%" fill="var(--paper)" />'
    head, close, rest = svg.partition(">")
    return f"{head}{close}<style>{style}</style>{background}{rest}"


def _make_ids_unique(root: ET.Element, name: str) -> None:
    """Prefix the ids that are referenced with the chart's name, and remove all others."""
    text = ET.tostring(root, "unicode")
    referenced = set(re.findall(r"url\(#([^)]+)\)", text)) | set(
        re.findall(r'href="#([^"]+)"', text)
    )
    new = {old: f"{name}-{index}" for index, old in enumerate(sorted(referenced))}
    for element in root.iter():
        if (old := element.attrib.pop("id", None)) in new:
            element.attrib["id"] = new[old]
        if reference := element.attrib.pop(_HREF, None):
            element.attrib["href"] = "#" + new[reference[1:]]
        for key, value in element.attrib.items():
            element.attrib[key] = re.sub(
                r"url\(#([^)]+)\)", lambda match: f"url(#{new[match[1]]})", value
            )
