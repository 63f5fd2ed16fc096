"""Each step once: the values that a service has from earlier attempts, and the missing ones.

A resumed attempt repeats the steps since its checkpoint, and a killed attempt may have lost queued
lines of earlier steps. So an attempt skips the values that the service has, and first sends those
of `metrics.jsonl` that it lacks. The first value of a step remains.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from regauge import jsonl
from regauge.trackers._sender import MetricsLine

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from regauge.trackers import RunInfo
    from regauge.trackers._sender import Deliver

    Recorded = Collection[tuple[str, int]]
    """Names, as the service writes them, and steps."""

METRICS_FILE = "metrics.jsonl"
"""The file of the tracker `jsonl`."""
OTHER_FIELDS = {"attempt", "step", "seconds", "summary"}
NON_FINITE = {"NaN", "Infinity", "-Infinity"}


def deliver_once(
    deliver: Deliver, recorded: Recorded, format_name: Callable[[str], str], run: RunInfo
) -> Deliver:
    """Send the missing lines of earlier attempts; return a function that skips recorded values."""

    def deliver_new(lines: list[MetricsLine]) -> None:
        new_lines = [_drop_recorded(line, recorded, format_name) for line in lines]
        deliver([line for line in new_lines if len(line) or line.final_status])

    if missing := read_metrics(run.folder / METRICS_FILE, run.resumed_step):
        deliver_new(missing)
    return deliver_new


def read_metrics(path: Path, max_step: int) -> list[MetricsLine]:
    """Return the metrics of a file up to a step, in the order of the steps.

    The last value of a name and a step is valid.
    """
    steps: dict[int, dict[str, float]] = {}
    for line in jsonl.read_lines(path, jsonl.StepLine):
        if line["step"] <= max_step:
            steps.setdefault(line["step"], {}).update(
                {
                    name: float(value)
                    for name, value in line.items()
                    if name not in OTHER_FIELDS
                    and (isinstance(value, int | float) or value in NON_FINITE)
                }
            )
    return [MetricsLine(step, steps[step]) for step in sorted(steps)]


def _drop_recorded(
    line: MetricsLine, recorded: Recorded, format_name: Callable[[str], str]
) -> MetricsLine:
    values = {
        name: value
        for name, value in line.values.items()
        if (format_name(name), line.step) not in recorded
    }
    return replace(line, values=values)
