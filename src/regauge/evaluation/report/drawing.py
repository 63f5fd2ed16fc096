"""Charts as SVG text: drawn by matplotlib, coloured by the embedding page.

Line styles, markers and hatches make every chart readable without colour. Colours and font come
from the page. A title and a description serve screen readers.
"""

from __future__ import annotations

import io
import re
from html import escape
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from regauge.evaluation.report.charts import (
    COUNTED_UNITS,
    BarChart,
    CurveChart,
    MatrixChart,
    ReferenceLine,
)
from regauge.run_folders import formatting
from regauge.run_folders.series import downsample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from regauge.evaluation.report.charts import Band, Chart, Curve

MAX_POINTS = 400
"""Maximum points per drawn curve; more cannot be distinguished at chart size."""
MAX_COUNTED_CLASSES = 12
"""Largest class count for which confusion matrix cells show their counts."""
MAX_CELL_ALPHA = 0.75
"""Opacity of a cell with all rows in its class; the count stays readable."""
MAX_NAME = 18
"""Class name characters on a confusion matrix axis."""
WIDTH, HEIGHT = 5.0, 2.9
"""Chart size in inches; a chart with many bars is taller."""
CSS = Path(__file__).parent / "report.css"

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
"""Placeholder colour in the drawing -> CSS colour."""

_INK, _MUTED, _RULE, *_SERIES = COLOURS
_HATCHES = ("", "////", "....", "xxxx", "----")
_STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (6, 1, 1, 1)), "v"))

_RC: Any = {
    "svg.fonttype": "none",
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


def draw(chart: Chart, key: str, owner: str) -> str:
    """Return a chart as SVG for a page.

    `key` makes its ids unique in the page. `owner` names the run or benchmark in the chart, for
    screen readers.
    """
    name = re.sub(r"[^a-z0-9]+", "-", f"{key}-{chart.title}".lower())
    with mpl.rc_context({**_RC, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH, _find_height(chart)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        _plot(axes, chart)
        handles, _ = axes.get_legend_handles_labels()
        if len(handles) > 1:
            _draw_legend(axes, figure)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return _embed_svg(svg.getvalue(), name, f"{chart.title} of {owner}", chart.text)


def draw_file(chart: Chart, owner: str) -> str:
    """Return a chart as a separate SVG file, in the page's light colours."""
    light = CSS.read_text(encoding="utf-8").partition("@media")[0]
    colours = re.findall(r"--(?:paper|ink|muted|rule|series-\d): [^;]+;", light)
    style = f":root {{ {' '.join(colours)} font-family: system-ui, sans-serif; }}"
    background = '<rect width="100%" height="100%" fill="var(--paper)" />'
    head, close, rest = draw(chart, "benchmark", owner).partition(">")
    return f"{head}{close}<style>{style}</style>{background}{rest}"


def _find_height(chart: Chart) -> float:
    if isinstance(chart, BarChart):
        return max(HEIGHT, 0.8 + 0.24 * len(chart.bars))
    return max(HEIGHT, 1.4 + 0.28 * len(chart.names)) if isinstance(chart, MatrixChart) else HEIGHT


def _plot(axes: Axes, chart: Chart) -> None:
    if isinstance(chart, CurveChart):
        _plot_curves(axes, chart)
    elif isinstance(chart, BarChart):
        _plot_bars(axes, chart)
    else:
        _plot_matrix(axes, chart)


def _draw_legend(axes: Axes, figure: Figure) -> None:
    """Draw the legend above the axes, in as many columns as fit."""
    for columns in (3, 2, 1):
        legend = axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 1.0), ncols=columns)
        legend.set_in_layout(False)  # the axes would shrink for a legend that is too wide
        figure.draw_without_rendering()
        if legend.get_window_extent().x1 <= figure.bbox.x1:
            legend.set_in_layout(True)
            return


def _plot_curves(axes: Axes, chart: CurveChart) -> None:
    scale = chart.scale
    for reference in chart.references:
        _plot_reference(axes, reference)
    looks = cycle(zip(_SERIES, _STYLES, strict=True))
    for curve in chart.curves:
        _plot_curve(axes, curve, None if curve.style == "raw" else next(looks))
    axes.set_xlabel(scale.x)
    if scale.y:
        axes.set_ylabel(scale.y)
    if scale.logarithmic:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(_format_tick))
    is_counted = scale.x in COUNTED_UNITS
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=is_counted))
    if not is_counted:
        axes.xaxis.set_major_formatter(FuncFormatter(_format_tick))


def _plot_curve(axes: Axes, curve: Curve, look: tuple[str, Any] | None) -> None:
    steps, values = zip(*downsample(curve.points, MAX_POINTS), strict=True)
    if look is None:
        axes.plot(steps, values, color=_MUTED, linewidth=0.7, alpha=0.5, label=curve.label)
        return
    colour, (dashes, marker) = look
    markers = {"marker": marker, "markerfacecolor": "none"} if curve.style == "points" else {}
    axes.plot(steps, values, color=colour, linestyle=dashes, label=curve.label, **markers)


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


def _plot_bars(axes: Axes, chart: BarChart) -> None:
    bars = [dict(bar.pieces) for bar in chart.bars]
    names = list(dict.fromkeys(name for pieces in bars for name in pieces))
    ends = [0.0] * len(bars)
    for name, colour, hatch in zip(names, cycle(_SERIES), cycle(_HATCHES), strict=False):
        rows = [row for row, pieces in enumerate(bars) if name in pieces]
        sizes = [bars[row][name] for row in rows]
        axes.barh(
            rows, sizes, left=[ends[row] for row in rows], height=0.6, label=name,
            facecolor="none", edgecolor=colour, hatch=hatch, linewidth=1.2,
        )  # fmt: skip
        for row, size in zip(rows, sizes, strict=True):
            ends[row] += size
    axes.set_yticks(range(len(bars)), [bar.label for bar in chart.bars])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_xlabel(chart.unit.strip())
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(_format_tick))


def _plot_matrix(axes: Axes, chart: MatrixChart) -> None:
    """Plot the confusion matrix cells, each as dark as its share of the row."""
    count = len(chart.names)
    for row, values in enumerate(chart.cells):
        total = max(sum(values), 1)
        for column, value in enumerate(values):
            alpha, corner = MAX_CELL_ALPHA * value / total, (column - 0.5, row - 0.5)
            look: dict[str, Any] = {"facecolor": _SERIES[0], "alpha": alpha, "linewidth": 0}
            axes.add_patch(Rectangle(corner, 1, 1, **look))
            if count <= MAX_COUNTED_CLASSES:
                text = formatting.count(value) if value >= 10_000 else str(value)  # noqa: PLR2004  (fits a cell)
                axes.text(column, row, text, ha="center", va="center", fontsize=9, color=_INK)
    labels = [name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…" for name in chart.names]
    axes.set_xticks(range(count), labels, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(count), labels)
    axes.set_xlim(-0.5, count - 0.5)
    axes.set_ylim(count - 0.5, -0.5)
    axes.grid(visible=False)
    axes.set_xlabel("predicted")
    axes.set_ylabel("actual")


def _format_tick(value: float, _position: int | None) -> str:
    """Return a tick label: 12k, 2.5, 5e-04."""
    if abs(value) >= 1000:  # noqa: PLR2004  (k, M, B)
        return re.sub(r"\.0+(?=\D)", "", formatting.count(value))
    if 0 < abs(value) < 0.001:  # noqa: PLR2004  (too many zeros to count at a glance)
        return f"{value:.1e}".replace(".0e", "e")
    return f"{value:g}"


def _embed_svg(svg: str, name: str, title: str, text: str) -> str:
    """Return an SVG for a page: with the page's colours, a title and a description.

    Ids used by matplotlib references are hashes salted with the chart's name; all others are
    removed.
    """
    root, _, body = svg[svg.index("<svg") :].partition(">")
    root = re.sub(r' (?:width|height|xmlns:xlink)="[^"]*"', "", root)
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r' id="[^"]*_\d+"', "", body).replace("xlink:href", "href")
    body = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", body)
    body = re.sub("|".join(COLOURS), lambda match: COLOURS[match[0]], body)
    return (
        f'{root} role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title, quote=False)}</title>'
        f'<desc id="{name}-desc">{escape(text, quote=False)}</desc>{body}'
    )
