"""Lines as SVG text that a page can hold: drawn by matplotlib, coloured by the page.

Every chart is readable without colour (line styles and markers), takes its colours and its font
from the page it is in, and tells a screen reader what it shows.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from regauge.results import formatting
from regauge.results.series import Points, thinned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from matplotlib.axes import Axes

POINTS = 400
"""More points than this cannot be told apart at the size of a chart."""
WIDTH, HEIGHT = 5.0, 2.9
"""Of a chart, in inches; one of many bars is taller."""

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
"""Colours nobody draws with, and what the page puts in their place."""

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


COUNTED = {"step": "steps", "process": "processes"}
"""What an x axis may count in whole numbers, and more of it."""


@dataclass(frozen=True)
class Chart:
    """A drawing with its caption."""

    title: str
    text: str
    """What it shows, in a sentence."""
    svg: str


@dataclass(frozen=True)
class Line:
    """A curve of a chart."""

    label: str
    series: Points
    look: str
    """`raw` is thin and pale, `mean` solid, `points` marked."""


@dataclass(frozen=True)
class Band:
    """An area between two curves."""

    label: str
    lower: Points
    upper: Points
    hatched: bool = False


@dataclass(frozen=True)
class Level:
    """A value that holds at every place."""

    label: str
    value: float


@dataclass(frozen=True)
class Bar:
    """A bar of pieces, one behind the other."""

    label: str
    pieces: tuple[tuple[str, float], ...]
    """Name and size; what is named alike in the bars of one chart looks alike."""


@dataclass(frozen=True)
class Place:
    """Where a chart is in its page."""

    key: str
    """Keeps ids apart."""
    of: str
    """Whose chart it is, for a screen reader."""


@dataclass(frozen=True)
class Scale:
    """What the axes show."""

    x: str = "step"
    y: str = ""
    logarithmic: bool = False
    """Whether values are told apart by their ratios; what is not above 0 is not drawn then."""


STEPS = Scale()


def curves(
    title: str,
    lines: list[Line],
    place: Place,
    *,
    scale: Scale = STEPS,
    beside: tuple[Band | Level, ...] = (),
) -> list[Chart]:
    """Draw lines where there is something to see: two points at least."""
    lines = [line for line in lines if len(line.series) > 1]
    if not lines:
        return []
    if len(lines) == 1 and lines[0].look == "points":
        title = f"{title}: {lines[0].label}"
    text = " ".join(_told(line, scale) for line in lines if line.look != "raw" or len(lines) == 1)
    return [_chart(title, text, place, lambda axes: _curves(axes, lines, scale, beside))]


def bars(title: str, found: list[Bar], place: Place, *, unit: str) -> list[Chart]:
    """Draw bars beside each other, where there is one."""
    if not found:
        return []
    text = " ".join(
        f"{bar.label}: "
        + ", ".join(f"{name} {formatting.number(float(size))}{unit}" for name, size in bar.pieces)
        + "."
        for bar in found
    )
    tall = max(HEIGHT, 0.8 + 0.24 * len(found))
    return [_chart(title, text, place, lambda axes: _bars(axes, found, unit), tall)]


def _told(line: Line, scale: Scale) -> str:
    values = [value for _, value in line.series]
    (first, start), (last, end) = line.series[0], line.series[-1]
    between = f"{COUNTED.get(scale.x)} {first:,} and {last:,}"
    if scale.x not in COUNTED:
        between = (
            f"{formatting.number(float(first))} and {formatting.number(float(last))} {scale.x}"
        )
    return (
        f"{line.label}: {formatting.change(start, end)} between {between}, "
        f"smallest {formatting.number(min(values))}, largest {formatting.number(max(values))}."
    )


def _chart(
    title: str, text: str, place: Place, draw: Callable[[Axes], None], height: float = HEIGHT
) -> Chart:
    with mpl.rc_context(_RC):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes)
        handles, _ = axes.get_legend_handles_labels()
        if len(handles) > 1:
            _legend(axes, figure)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    name = re.sub(r"[^a-z0-9]+", "-", f"{place.key}-{title}".lower())
    return Chart(title, text, embeddable(drawn.getvalue(), name, f"{title} of {place.of}", text))


def _legend(axes: Axes, figure: Figure) -> None:
    """Name what is drawn above the axes, in as many columns as have room."""
    for columns in (3, 2, 1):
        legend = axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 1.0), ncols=columns)
        legend.set_in_layout(False)  # the axes would shrink beside one that is too wide
        figure.draw_without_rendering()
        if legend.get_window_extent().x1 <= figure.bbox.x1:
            legend.set_in_layout(True)
            return


def _curves(
    axes: Axes, lines: Iterable[Line], scale: Scale, beside: tuple[Band | Level, ...]
) -> None:
    for extra in beside:
        _draw_beside(axes, extra)
    looks = cycle(zip(_SERIES, STYLES, strict=True))
    for line in lines:
        _draw(axes, line, None if line.look == "raw" else next(looks))
    axes.set_xlabel(scale.x)
    if scale.y:
        axes.set_ylabel(scale.y)
    if scale.logarithmic:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=scale.x in COUNTED))
    if scale.x not in COUNTED:
        axes.xaxis.set_major_formatter(FuncFormatter(_tick))


def _draw_beside(axes: Axes, extra: Band | Level) -> None:
    if isinstance(extra, Level):
        axes.axhline(extra.value, color=_MUTED, linewidth=1.0, linestyle=(0, (1, 2)))
        axes.annotate(
            extra.label,
            (1.0, extra.value),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            color=_MUTED,
            fontsize=9,
        )
        return
    steps, lower = zip(*extra.lower, strict=True)
    upper = [value for _, value in extra.upper]
    look: dict[str, Any] = {"color": _RULE, "alpha": 0.7}
    if extra.hatched:
        look = {"hatch": "////", "edgecolor": _MUTED, "facecolor": "none"}
    axes.fill_between(steps, lower, upper, linewidth=0, label=extra.label, **look)


def _bars(axes: Axes, found: list[Bar], unit: str) -> None:
    names = list(dict.fromkeys(name for bar in found for name, _ in bar.pieces))
    looks = list(zip(names, cycle(_SERIES), cycle(_HATCHES), strict=False))
    places = range(len(found))
    before = [0.0] * len(found)
    for name, colour, hatch in looks:
        own = [place for place in places if name in dict(found[place].pieces)]
        sizes = [dict(found[place].pieces)[name] for place in own]
        axes.barh(
            own, sizes, left=[before[place] for place in own], height=0.6, label=name,
            facecolor="none", edgecolor=colour, hatch=hatch, linewidth=1.2,
        )  # fmt: skip
        for place, size in zip(own, sizes, strict=True):
            before[place] += size
    axes.set_yticks(list(places), [bar.label for bar in found])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_xlabel(unit.strip())
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))


def _tick(value: float, _place: int | None) -> str:
    """Return a tick's label: 12k, 2.5, 5e-04."""
    if abs(value) >= 1000:  # noqa: PLR2004  (k, M, B)
        return re.sub(r"\.0+(?=\D)", "", formatting.count(value))
    if 0 < abs(value) < 0.001:  # noqa: PLR2004  (more zeros than can be counted at a glance)
        return f"{value:.1e}".replace(".0e", "e")
    return f"{value:g}"


def _draw(axes: Axes, line: Line, look: tuple[str, Any] | None) -> None:
    steps, values = zip(*thinned(line.series, POINTS), strict=True)
    if look is None:
        axes.plot(steps, values, color=_MUTED, linewidth=0.7, alpha=0.5, label=line.label)
        return
    colour, (dashes, marker) = look
    marks = {"marker": marker, "markerfacecolor": "none"} if line.look == "points" else {}
    axes.plot(steps, values, color=colour, linestyle=dashes, label=line.label, **marks)


def embeddable(svg: str, name: str, title: str, text: str) -> str:
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
    return re.sub("|".join(COLOURS), lambda found: COLOURS[found[0]], result)


def standing_alone(svg: str) -> str:
    """Return an SVG of `embeddable` as a file of its own, in the light colours of a page."""
    css = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    light = css.partition("@media")[0]
    colours = re.findall(r"--(?:paper|ink|muted|rule|series-\d): [^;]+;", light)
    style = f":root {{ {' '.join(colours)} font-family: system-ui, sans-serif; }}"
    ground = '<rect width="100%" height="100%" fill="var(--paper)" />'
    head, close, rest = svg.partition(">")
    return f"{head}{close}<style>{style}</style>{ground}{rest}"


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
