"""Lines of metrics as series over the steps that count.

Where a run was resumed, the steps behind the resume point were run again: the last attempt's
values stand, and what earlier attempts had measured there is lost work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

Series = tuple[tuple[int, float], ...]
"""(step, value) in the order of steps."""
Points = tuple[tuple[float, float], ...]
"""(x, y) of a curve."""

_OWN = ("attempt", "step", "seconds")


@dataclass(frozen=True)
class Attempt:
    """One launch of a run, as its metrics show it."""

    number: int
    first: int
    """First step with a line."""
    last: int
    """Last step with a line."""
    again: int | None
    """Step from which a later attempt ran it again; None where every step counts."""
    seconds: float | None
    """From the start of the attempt to its last line."""
    end: str | None = None
    """How it ended, as its supervisor wrote it; None where it goes on, or had none."""


def attempts(lines: list[dict[str, Any]], ends: Mapping[int, str]) -> tuple[Attempt, ...]:
    """Return the attempts that lines came from, in the order of their numbers."""
    ordered = sorted(lines, key=lambda line: int(line["attempt"]))
    found: list[Attempt] = []
    groups = [(number, list(own)) for number, own in groupby(ordered, lambda line: line["attempt"])]
    again: int | None = None
    for number, own in reversed(groups):
        steps = [int(line["step"]) for line in own]
        seconds = max((line["seconds"] for line in own if "seconds" in line), default=None)
        found.append(Attempt(number, min(steps), max(steps), again, seconds, ends.get(number)))
        again = min(steps) if again is None else min(again, *steps)
    return tuple(reversed(found))


def merged(lines: list[dict[str, Any]], found: tuple[Attempt, ...]) -> dict[str, Series]:
    """Return the values of each name by step; of a repeated step the last attempt's."""
    again = {attempt.number: attempt.again for attempt in found}
    values: dict[str, dict[int, float]] = {}
    for line in sorted(lines, key=lambda line: int(line["attempt"])):
        limit = again[line["attempt"]]
        if limit is not None and line["step"] > limit:
            continue
        for name, value in line.items():
            if name not in _OWN and (number := _number(value)) is not None:
                values.setdefault(name, {})[int(line["step"])] = number
    return {name: tuple(sorted(series.items())) for name, series in values.items()}


def _number(value: object) -> float | None:
    """Return a value as a float; the jsonl tracker writes NaN and infinities as text."""
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        return None
    return float(value) if isinstance(value, int | float | str) else None


def smoothed(series: Series) -> Series:
    """Return an exponential mean over about a thirtieth of the points, corrected at its start."""
    keep = 1 - 2 / (max(2.0, len(series) / 30) + 1)
    mean = weight = 0.0
    result: list[tuple[int, float]] = []
    for step, value in series:
        if value - value == 0:  # finite: a NaN would stay in the mean for ever
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        if weight:
            result.append((step, mean / weight))
    return tuple(result)


def thinned(series: Points, points: int) -> Points:
    """Return at most about `points` of them: the smallest and the largest of each piece.

    Spikes stay visible, which a mean would hide.
    """
    if len(series) <= points:
        return series
    size = -(-2 * len(series) // points)
    chosen: list[tuple[float, float]] = []
    for start in range(0, len(series), size):
        piece = series[start : start + size]
        ends = {min(piece, key=lambda point: point[1]), max(piece, key=lambda point: point[1])}
        chosen.extend(sorted(ends))
    return tuple(chosen)
