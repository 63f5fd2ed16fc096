"""A run's metric lines as one series per metric, across all attempts.

A resumed run repeats the steps after its resume point. The last attempt's values count; earlier
values for the repeated steps are lost work and are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from regauge.monitoring.trackers import AVERAGED_STEPS, TRAIN_LOSS
from regauge.system import jsonl

if TYPE_CHECKING:
    from collections.abc import Iterator

Series = tuple[tuple[int, float], ...]
"""(step, value), sorted by step."""
Points = tuple[tuple[float, float], ...]
"""(x, y) points on a curve."""

_LINE_KEYS = ("attempt", "step", "seconds")


@dataclass(frozen=True)
class AttemptSummary:
    number: int
    first_step: int
    last_step: int
    rerun_from_step: int | None
    """Step from which a later attempt repeated this one; None if every step counts."""
    seconds: float | None
    """Seconds from the attempt's start to its last line."""
    outcome: str | None = None
    """How the attempt ended, as the supervisor recorded it; None if running or unsupervised."""


def summarize_attempts(
    lines: list[dict[str, Any]], ends: Mapping[int, str]
) -> tuple[AttemptSummary, ...]:
    """Return the attempts that wrote these lines, by number.

    `ends` maps an attempt's number to how it ended.
    """
    ordered = sorted(lines, key=lambda line: int(line["attempt"]))
    groups = [
        (number, list(group)) for number, group in groupby(ordered, lambda line: line["attempt"])
    ]
    summaries: list[AttemptSummary] = []
    rerun_from: int | None = None
    for number, attempt_lines in reversed(groups):
        steps = [int(line["step"]) for line in attempt_lines]
        seconds = max(
            (line["seconds"] for line in attempt_lines if "seconds" in line), default=None
        )
        end = ends.get(number)
        summaries.append(AttemptSummary(number, min(steps), max(steps), rerun_from, seconds, end))
        rerun_from = min(steps) if rerun_from is None else min(rerun_from, *steps)
    return tuple(reversed(summaries))


def merge_attempts(
    lines: list[dict[str, Any]], attempts: tuple[AttemptSummary, ...]
) -> dict[str, Series]:
    """Return one series per metric; the last attempt's value counts for a repeated step."""
    limits = {attempt.number: attempt.rerun_from_step for attempt in attempts}
    values: dict[str, dict[int, float]] = {}
    for line in _infer_averaged_steps(sorted(lines, key=lambda line: int(line["attempt"]))):
        limit = limits[line["attempt"]]
        if limit is not None and line["step"] > limit:
            continue
        for name, value in line.items():
            if name not in _LINE_KEYS and (number := jsonl.parse_number(value)) is not None:
                values.setdefault(name, {})[int(line["step"])] = number
    return {name: tuple(sorted(series.items())) for name, series in values.items()}


def _infer_averaged_steps(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield lines by attempt; a training line without AVERAGED_STEPS gets it from its predecessor.

    It stays unknown in a later attempt's first training line.
    """
    attempt = 1
    last_step: int | None = 0
    for line in lines:
        if line["attempt"] != attempt:
            attempt, last_step = line["attempt"], None
        if TRAIN_LOSS in line:
            if AVERAGED_STEPS not in line and last_step is not None:
                line = {**line, AVERAGED_STEPS: line["step"] - last_step}  # noqa: PLW2901
            last_step = line["step"]
        yield line


def smooth(series: Series) -> Series:
    """Return the bias-corrected exponential moving average over about 1/30 of the points."""
    decay = 1 - 2 / (max(2.0, len(series) / 30) + 1)
    mean = weight = 0.0
    result: list[tuple[int, float]] = []
    for step, value in series:
        if value - value == 0:  # finite: a NaN would stay in the mean for ever
            mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        if weight:
            result.append((step, mean / weight))
    return tuple(result)


def downsample(series: Points, max_points: int) -> Points:
    """Return about `max_points` points: each interval's smallest and largest.

    Spikes stay visible; a mean would hide them.
    """
    if len(series) <= max_points:
        return series
    size = -(-2 * len(series) // max_points)
    selected: list[tuple[float, float]] = []
    for start in range(0, len(series), size):
        interval = series[start : start + size]
        extremes = {
            min(interval, key=lambda point: point[1]),
            max(interval, key=lambda point: point[1]),
        }
        selected.extend(sorted(extremes))
    return tuple(selected)
