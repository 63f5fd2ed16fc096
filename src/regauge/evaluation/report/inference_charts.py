"""Charts of an inference benchmark: throughput, and latency by request rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.evaluation.report import inference_section
from regauge.evaluation.report.drawing import (
    AxisScale,
    Bar,
    Chart,
    ChartContext,
    Curve,
    draw_bars,
    draw_curves,
)

if TYPE_CHECKING:
    from regauge.evaluation.report.inference_section import Document, InferenceSection

CHARTED_PERCENTILES = (50, 99)
"""Percentiles of the latency that are drawn."""
LOG_SCALE_RATIO = 20
"""Ratio of the largest to the smallest latency above which the axis is logarithmic."""


def build_charts(section: InferenceSection, context: ChartContext) -> list[Chart]:
    """Draw inferences per second, and the latency by request rate for each batch x length."""
    return [
        *build_throughput_chart(section, context),
        *_build_latency_charts(section.document, context),
    ]


def build_throughput_chart(section: InferenceSection, context: ChartContext) -> list[Chart]:
    """Draw the inferences per second of every artifact and batch x length."""
    document = section.document
    bars = [
        Bar(
            inference_section.format_shape(document, row),
            ((row["artifact"], row["closed_loop"]["inferences_per_second"]),),
        )
        for row in inference_section.order_rows(document)
    ]
    title = "Inferences per second, closed loop"
    return draw_bars(title, bars, context, unit=" inferences/s")


def _build_latency_charts(document: Document, context: ChartContext) -> list[Chart]:
    """Draw the latency by request rate, for each batch x length with two rates or more."""
    charts: list[Chart] = []
    shapes = dict.fromkeys((row["batch_size"], row["input_length"]) for row in document["rows"])
    for batch_size, length in shapes:
        curves = [
            curve
            for row in document["rows"]
            if (row["batch_size"], row["input_length"]) == (batch_size, length)
            for curve in _build_curves(row)
        ]
        values = [value for curve in curves for _, value in curve.points]
        logarithmic = bool(values) and max(values) > LOG_SCALE_RATIO * min(values)
        scale = AxisScale(x="requests/s", y="ms", logarithmic=logarithmic)
        title = f"Latency at {batch_size} x {length} by request rate"
        charts += draw_curves(title, curves, context, scale=scale)
    return charts


def _build_curves(row: dict[str, Any]) -> list[Curve]:
    """Return the curve of each percentile over the request rates of a row."""
    loads = sorted(row["open_loop"], key=lambda load: load["requests_per_second"])
    curves = []
    for percent in CHARTED_PERCENTILES:
        points = [(load["requests_per_second"], load[f"p{percent}_ms"]) for load in loads]
        known = tuple((rate, value) for rate, value in points if value is not None)
        curves.append(Curve(f"{row['artifact']} p{percent}", known, "points"))
    return curves
