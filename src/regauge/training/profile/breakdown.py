"""Where the seconds of profiled steps went: by kind of work, and by part of the model. No torch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from regauge.training.profile.trace import LOSS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.training.profile.trace import Span, Trace

MICROSECOND = 1e-6

Interval = tuple[float, float]


@dataclass
class Part:
    """Seconds of a part of the model or of the step, all profiled steps together."""

    forward: float = 0.0
    backward: float = 0.0
    products: float = 0.0
    """Of both, those in products of matrices."""
    flops: float = 0.0
    bytes: float = 0.0
    """What its products computed, read and wrote."""

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Breakdown:
    """Seconds of all profiled steps together."""

    steps: int
    wall: float
    kinds: dict[Kind | Literal["data"], float]
    """They add up to `wall`; of communication, what is not hidden behind computing."""
    hidden: float
    """Communication behind which there was computing."""
    parts: dict[str, Part]
    """By name, the longest first; the numbers of repeated layers are `*`."""


def build_breakdown(trace: Trace, data_seconds: float) -> Breakdown:
    """Return where the time of a trace's steps went, and of the waiting for their data."""
    steps = [(step.begin, step.end) for step in trace.steps]
    inside = [each for each in trace.work if _within(steps, each.begin)]
    computed = [each for each in inside if each.kind != "communication"]
    busy = _union((each.begin, each.end) for each in computed)
    both = _union((each.begin, each.end) for each in inside)
    sent = _union((each.begin, each.end) for each in inside if each.kind == "communication")
    kinds: dict[Kind | Literal["data"], float] = defaultdict(float)
    parts: dict[str, Part] = defaultdict(Part)
    counted: set[Span] = set()
    # Kernels that a device computes beside each other share their time.
    share = _length(busy) / max(_length((each.begin, each.end) for each in computed), 1e-12)
    for each in computed:
        seconds, span = (each.end - each.begin) * MICROSECOND * share, each.span
        kinds[each.kind] += seconds
        part = parts[span.part or LOSS]
        if span.backward:
            part.backward += seconds
        else:
            part.forward += seconds
        if each.kind == "products":
            part.products += seconds
        if span not in counted:
            counted.add(span)
            part.flops += span.product.flops
            part.bytes += span.product.bytes
    exposed = _length(both) - _length(busy)
    wall = _length(steps) + data_seconds
    host = max(0.0, _length(steps) - _length(both))
    kinds |= {"communication": exposed, "data": data_seconds, "host": host}
    order = sorted(parts.items(), key=lambda item: -item[1].seconds)
    return Breakdown(len(steps), wall, dict(kinds), _length(sent) - exposed, dict(order))


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return intervals that do not overlap, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _within(windows: list[Interval], moment: float) -> bool:
    return any(begin <= moment < end for begin, end in windows)


def _length(intervals: Iterable[Interval]) -> float:
    """Return the seconds of intervals, each counted whole."""
    return sum(end - begin for begin, end in intervals) * MICROSECOND
