"""Charts of a benchmark of inference: what each artifact answers, and how it waits under load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.reporting import inference_section
from regauge.reporting.drawing import Bar, Chart, Line, Place, Scale, bars, curves

if TYPE_CHECKING:
    from regauge.reporting.inference_section import Document, Inferences

SHOWN = (50, 99)
"""Percentiles of waiting that are drawn."""
FAR = 20
"""Times the least latency that are told apart by ratios alone."""


def charts(found: Inferences, place: Place) -> list[Chart]:
    """Draw inferences a second, and the latency of arrivals for each batch and length."""
    return [*answered(found, place), *_waiting(found.document, place)]


def answered(found: Inferences, place: Place) -> list[Chart]:
    """Draw inferences a second of every artifact, batch and length."""
    document = found.document
    rows = inference_section.in_order(document)
    drawn = [
        Bar(
            inference_section.place(document, row),
            ((row["artifact"], row["closed"]["inferences_per_second"]),),
        )
        for row in rows
    ]
    title = "Inferences per second, one request after the other"
    return bars(title, drawn, place, unit=" inferences/s")


def _waiting(document: Document, place: Place) -> list[Chart]:
    """Draw how long requests wait at each rate, where there were several."""
    drawn: list[Chart] = []
    where = dict.fromkeys((row["rows"], row["length"]) for row in document["rows"])
    for rows, length in where:
        lines = [
            line
            for row in document["rows"]
            if (row["rows"], row["length"]) == (rows, length)
            for line in _lines(row)
        ]
        title = f"Latency of {rows} x {length} by arrivals"
        values = [value for line in lines for _, value in line.series]
        far = bool(values) and max(values) > FAR * min(values)
        scale = Scale(x="requests/s", y="ms", logarithmic=far)
        drawn += curves(title, lines, place, scale=scale)
    return drawn


def _lines(row: dict[str, Any]) -> list[Line]:
    """Return a line for each percentile of a row that is known at two rates at least."""
    came = sorted(row["open"], key=lambda each: each["requests_per_second"])
    found = []
    for percent in SHOWN:
        key = f"p{percent}_ms"
        points = [(each["requests_per_second"], each[key]) for each in came]
        known = tuple((rate, value) for rate, value in points if value is not None)
        found.append(Line(f"{row['artifact']} p{percent}", known, "points"))
    return found
