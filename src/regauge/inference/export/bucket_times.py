"""Milliseconds per batch shape, so that a server can plan batches.

`bucket_times.json` has one entry for each measured shape. A program with static shapes is measured
in each of them. A program for any shape is measured in a grid of shapes, within a time limit; the
grid's corners are always measured.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from regauge.config import FORMAT
from regauge.inference.export.manifest import BUCKET_TIMES
from regauge.system.files import write_json
from regauge.system.json_files import DocumentShape, read_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from regauge.inference.export.artifact import Artifact

REMEDY = "copy the artifact again, or export it"


class BucketTime(DocumentShape, frozen=True):
    """Time for one batch shape."""

    length: int = Field(ge=1)
    """Tokens per row."""
    rows: int = Field(ge=1)
    """Rows per batch."""
    milliseconds: float = Field(gt=0)
    """Median over the runs."""


class BucketTimes(DocumentShape, frozen=True):
    """Measured batch times, and estimates for other shapes.

    Noise may make a larger batch faster than a smaller one, but a scheduler needs times that do not
    fall. So each time is raised to the times of smaller batches. Each shape may occur once.
    """

    threads: int
    """CPU threads during the measurement."""
    chip: str
    """Name of the measured chip."""
    times: list[BucketTime] = Field(min_length=1)
    """Times that never fall with length or rows."""

    @field_validator("times")
    @classmethod
    def _raise_times(cls, times: list[BucketTime]) -> list[BucketTime]:
        return [
            _raise_time(item, times) for item in sorted(times, key=attrgetter("length", "rows"))
        ]

    def milliseconds(self, length: int, rows: int) -> float:
        """Return the time for a batch of `rows` rows with `length` tokens.

        A measured shape has its measured time. Others are interpolated, linear in rows and length.
        Beyond the largest shape, a time is proportional to the tokens. A longer batch, or one with
        more rows, never takes less time.
        """
        grid = self._grid
        scale = max(1.0, rows / grid.rows[-1]) * max(1.0, length / grid.lengths[-1])
        left, right, fraction = _locate(grid.rows, rows)
        lower, upper, share = _locate(grid.lengths, length)
        short, long = (
            _interpolate(grid.times[index][left], grid.times[index][right], fraction)
            for index in (lower, upper)
        )
        return _interpolate(short, long, share) * scale

    @cached_property
    def _grid(self) -> _TimeGrid:
        return _build_grid(self.times)


@dataclass(frozen=True)
class _TimeGrid:
    lengths: list[int]
    rows: list[int]
    times: list[list[float]]
    """Milliseconds, [lengths, rows]; they never fall in either direction."""


def _locate(knots: list[int], value: int) -> tuple[int, int, float]:
    """Return the knots around a value, and where it lies between them, 0 to 1."""
    right = min(bisect_left(knots, value), len(knots) - 1)
    if right == 0 or value >= knots[right]:
        return right, right, 0.0
    start, end = knots[right - 1], knots[right]
    return right - 1, right, (value - start) / (end - start)


def _interpolate(start: float, end: float, fraction: float) -> float:
    return start + (end - start) * fraction


def _build_grid(times: Sequence[BucketTime]) -> _TimeGrid:
    """Return a grid of times from non-falling measured ones; other combinations are estimated.

    An estimate lies between the measured times of smaller and larger batches.
    """
    measured = {(item.length, item.rows): item.milliseconds for item in times}
    lengths = sorted({item.length for item in times})
    counts = sorted({item.rows for item in times})
    grid = [[0.0] * len(counts) for _ in lengths]
    for row, length in enumerate(lengths):
        for column, rows in enumerate(counts):
            least = max(
                grid[row - 1][column] if row else 0.0, grid[row][column - 1] if column else 0.0
            )
            estimate = measured.get((length, rows)) or _estimate(times, length, rows)
            larger = [
                item.milliseconds for item in times if item.length >= length and item.rows >= rows
            ]
            grid[row][column] = max(least, min([estimate, *larger]))
    smallest = min(item.milliseconds for item in times)
    return _TimeGrid(lengths, counts, [[max(value, smallest) for value in row] for row in grid])


def _estimate(times: Sequence[BucketTime], length: int, rows: int) -> float:
    """Estimate the time for an unmeasured shape.

    It is between the times for fewer and more rows, else between those for shorter and longer
    texts, else proportional to the tokens in the closest smaller batch.
    """
    by_rows = {item.rows: item.milliseconds for item in times if item.length == length}
    by_length = {item.length: item.milliseconds for item in times if item.rows == rows}
    for knots, value in ((by_rows, rows), (by_length, length)):
        if min(knots) < value < max(knots):
            ordered = sorted(knots)
            left, right, fraction = _locate(ordered, value)
            return _interpolate(knots[ordered[left]], knots[ordered[right]], fraction)
    smaller = [item for item in times if item.length <= length and item.rows <= rows]
    if not smaller:
        return min(item.milliseconds for item in times)
    closest = max(smaller, key=lambda item: item.length * item.rows)
    return closest.milliseconds * (length * rows) / (closest.length * closest.rows)


def _raise_time(time: BucketTime, times: Sequence[BucketTime]) -> BucketTime:
    """Return a time that is at least the times of smaller batches."""
    smaller = (
        other.milliseconds
        for other in times
        if other.length <= time.length and other.rows <= time.rows
    )
    return time.model_copy(update={"milliseconds": max(smaller)})


def write_bucket_times(folder: Path, times: BucketTimes) -> None:
    write_json(folder / BUCKET_TIMES, {"format": FORMAT, **times.model_dump()})


def read_bucket_times(artifact: Artifact) -> BucketTimes | None:
    """Read an artifact's times; None if it has none, as with older versions.

    Raises DataError if the file is damaged.
    """
    if BUCKET_TIMES not in artifact.manifest.files:
        return None
    document = read_json(artifact.folder / BUCKET_TIMES, REMEDY, BucketTimes)
    return BucketTimes.model_validate(document)
