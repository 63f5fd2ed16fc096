"""Chart contents as data, with descriptions for screen readers; `drawing` draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.run_folders import formatting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.run_folders.series import Points

COUNTED_UNITS = {"step": "steps", "process": "processes", "device": "devices"}
"""Countable x axis unit -> plural."""
LOG_SCALE_RATIO = 20
"""Ratio of the largest to the smallest latency above which the axis is logarithmic."""
NUM_LOOKS = 5
"""Combinations of colour, line style and marker."""
MAX_DESCRIBED_CELLS = 5


@dataclass(frozen=True)
class Curve:
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
    label: str
    value: float


@dataclass(frozen=True)
class Bar:
    """A stacked horizontal bar."""

    label: str
    pieces: tuple[tuple[str, float], ...]
    """(name, size) pairs; equal names look equal within a chart."""


@dataclass(frozen=True)
class AxisScale:
    """Axis units and scale."""

    x: str = "step"
    y: str = ""
    logarithmic: bool = False
    """Whether the y axis is logarithmic; values of 0 and below are then not drawn."""


@dataclass(frozen=True)
class CurveChart:
    """Curves over a common x axis, with bands and reference lines."""

    title: str
    curves: tuple[Curve, ...]
    scale: AxisScale
    references: tuple[Band | ReferenceLine, ...]

    @property
    def text(self) -> str:
        """Each curve's change and range, without raw curves if there are others."""
        described = [curve for curve in self.curves if curve.style != "raw"] or self.curves
        return " ".join(_describe_curve(curve, self.scale) for curve in described)


@dataclass(frozen=True)
class BarChart:
    """Stacked horizontal bars."""

    title: str
    bars: tuple[Bar, ...]
    unit: str
    """Unit with a leading space."""

    @property
    def text(self) -> str:
        """The size of each piece in each bar."""
        return " ".join(
            f"{bar.label}: "
            + ", ".join(
                f"{name} {formatting.number(float(size))}{self.unit}" for name, size in bar.pieces
            )
            + "."
            for bar in self.bars
        )


@dataclass(frozen=True)
class MatrixChart:
    title: str
    names: tuple[str, ...]
    """Class names."""
    cells: tuple[tuple[int, ...], ...]
    """Row counts, [actual class, predicted class]."""

    @property
    def text(self) -> str:
        """The correct row count, and the most frequent confusions."""
        confusions = [
            (count, actual, predicted)
            for actual, row in zip(self.names, self.cells, strict=True)
            for predicted, count in zip(self.names, row, strict=True)
            if actual != predicted and count
        ]
        largest = sorted(confusions, key=lambda confusion: -confusion[0])[:MAX_DESCRIBED_CELLS]
        correct = sum(row[index] for index, row in enumerate(self.cells))
        parts = [f"{correct:,} of {sum(map(sum, self.cells)):,} are correct."]
        parts += [
            f"{count:,} of {actual} are predicted as {predicted}."
            for count, actual, predicted in largest
        ]
        return " ".join(parts)


Chart = CurveChart | BarChart | MatrixChart
STEPS = AxisScale()


def chart_curves(
    title: str,
    curves: Sequence[Curve],
    scale: AxisScale = STEPS,
    references: tuple[Band | ReferenceLine, ...] = (),
) -> list[Chart]:
    """Return a chart of the curves with two or more points; empty without such curves."""
    shown = tuple(curve for curve in curves if len(curve.points) > 1)
    if not shown:
        return []
    if len(shown) == 1 and shown[0].style == "points":
        title = f"{title}: {shown[0].label}"
    return [CurveChart(title, shown, scale, references)]


def chart_bars(title: str, bars: Sequence[Bar], unit: str) -> list[Chart]:
    """Return a chart of horizontal bars; empty without bars."""
    return [BarChart(title, tuple(bars), unit)] if bars else []


def chart_latencies(title: str, curves: Sequence[Curve], x: str) -> list[Chart]:
    """Return a latency chart in ms, with a logarithmic axis if latencies differ much."""
    values = [value for curve in curves for _, value in curve.points]
    logarithmic = bool(values) and max(values) > LOG_SCALE_RATIO * min(values)
    return chart_curves(title, curves, AxisScale(x, "ms", logarithmic))


def chart_scaling(title: str, measured: Points, scale: AxisScale) -> list[Chart]:
    """Return a speed chart by device count, with linear scaling from the smallest count."""
    count, speed = measured[0]
    linear = tuple((number, speed * number / count) for number, _ in measured)
    curves = [Curve("measured", measured, "points"), Curve("linear scaling", linear, "mean")]
    return chart_curves(title, curves, scale)


def _describe_curve(curve: Curve, scale: AxisScale) -> str:
    values = [value for _, value in curve.points]
    (first, start), (last, end) = curve.points[0], curve.points[-1]
    if scale.x in COUNTED_UNITS:
        interval = f"{COUNTED_UNITS[scale.x]} {first:,} and {last:,}"
    else:
        limits = " and ".join(formatting.number(float(limit)) for limit in (first, last))
        interval = f"{limits} {scale.x}"
    return (
        f"{curve.label}: {formatting.change(start, end)} between {interval}, "
        f"smallest {formatting.number(min(values))}, largest {formatting.number(max(values))}."
    )
