"""Sums profiled step time by kind of work and by part of the model; imports no torch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from regauge.training.profile.trace import LOSS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.training.profile.trace import Span, Trace, WorkInterval

MICROSECOND = 1e-6

Interval = tuple[float, float]
"""Begin and end, in microseconds."""


@dataclass
class PartTime:
    """Time for a part of the model or step, in seconds over all profiled steps."""

    forward: float = 0.0
    backward: float = 0.0
    matmul_seconds: float = 0.0
    """In matrix products, forward and backward."""
    flops: float = 0.0
    """In matrix products."""
    bytes: float = 0.0
    """Bytes read and written by matrix products."""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Breakdown:
    """Time in seconds over all profiled steps."""

    steps: int
    wall: float
    """Elapsed seconds, including waiting for data."""
    by_kind: dict[Kind | Literal["data"], float]
    """Seconds by kind of work, which add up to `wall`, without hidden communication."""
    overlapped_communication: float
    """Seconds in which communication overlaps with computation."""
    by_module: dict[str, PartTime]
    """Part -> time, longest first; `*` replaces the numbers of repeated layers."""


def build_breakdown(trace: Trace, data_seconds: float) -> Breakdown:
    """Break down a trace; `data_seconds` is the time spent waiting for data."""
    steps = [(step.begin, step.end) for step in trace.steps]
    work = [item for item in trace.work if _is_within(steps, item.begin)]
    compute = [item for item in work if item.kind != "communication"]
    communication = [item for item in work if item.kind == "communication"]
    compute_seconds = _total_seconds(_merge_intervals(compute))
    busy_seconds = _total_seconds(_merge_intervals(work))
    step_seconds = _total_seconds(steps)
    # Kernels that run concurrently share their time.
    share = compute_seconds / max(_total_seconds([_interval(item) for item in compute]), 1e-12)
    kinds, parts = _sum_work(compute, share)
    exposed = busy_seconds - compute_seconds
    host = max(0.0, step_seconds - busy_seconds)
    kinds |= {"communication": exposed, "data": data_seconds, "host": host}
    return Breakdown(
        steps=len(steps),
        wall=step_seconds + data_seconds,
        by_kind=kinds,
        overlapped_communication=_total_seconds(_merge_intervals(communication)) - exposed,
        by_module=dict(sorted(parts.items(), key=lambda item: -item[1].seconds)),
    )


def _sum_work(
    compute: list[WorkInterval], share: float
) -> tuple[dict[Kind | Literal["data"], float], dict[str, PartTime]]:
    """Return seconds by kind and time by part; durations are multiplied by `share`."""
    kinds: dict[Kind | Literal["data"], float] = defaultdict(float)
    parts: dict[str, PartTime] = defaultdict(PartTime)
    counted: set[Span] = set()
    for item in compute:
        seconds, span = (item.end - item.begin) * MICROSECOND * share, item.span
        kinds[item.kind] += seconds
        part = parts[span.part or LOSS]
        if span.is_backward:
            part.backward += seconds
        else:
            part.forward += seconds
        if item.kind == "matmul":
            part.matmul_seconds += seconds
        if span not in counted:
            counted.add(span)
            part.flops += span.matmul.flops
            part.bytes += span.matmul.bytes
    return dict(kinds), parts


def _interval(item: WorkInterval) -> Interval:
    return item.begin, item.end


def _merge_intervals(work: Iterable[WorkInterval]) -> list[Interval]:
    """Return the union of work intervals, as disjoint intervals in order."""
    merged: list[Interval] = []
    for begin, end in sorted(_interval(item) for item in work):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _is_within(windows: list[Interval], moment: float) -> bool:
    return any(begin <= moment < end for begin, end in windows)


def _total_seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals) * MICROSECOND
