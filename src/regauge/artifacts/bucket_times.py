"""Milliseconds of the batches of a program by their shapes, so that a server can plan batches.

`bucket_times.json` has one entry for each measured shape. A program with static shapes is measured
in each of them. A program that takes any shape is measured in a grid of shapes, within a limit of
time; the corners of the grid are always measured.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left, bisect_right
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from regauge import stop_signals
from regauge.artifacts.engine import is_out_of_memory
from regauge.artifacts.manifest import BUCKET_TIMES
from regauge.config import FORMAT
from regauge.files import write_json
from regauge.json_files import DocumentShape, read_json
from regauge.models.inference_modules import example_inputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from regauge.artifacts.artifact import Artifact
    from regauge.artifacts.manifest import Bucket
    from regauge.backends import Runner
    from regauge.models.io_spec import TensorSpec

MAX_GRID_LENGTHS = 8
"""Most lengths of the grid of a program that takes any shape."""
MIN_RUNS = 3
"""How often a shape is timed; the median counts, so a first run that compiles a graph does not."""
REMEDY = "copy the artifact again, or export it"


class BucketTime(DocumentShape, frozen=True):
    """The time of a batch of one shape."""

    length: int = Field(ge=1)
    """Tokens of each row."""
    rows: int = Field(ge=1)
    """Rows of the batch."""
    milliseconds: float = Field(gt=0)
    """Median of its runs."""


class BucketTimesShape(DocumentShape):
    """The keys of `bucket_times.json`."""

    times: list[BucketTime] = Field(min_length=1)
    threads: int
    chip: str


@dataclass(frozen=True)
class BucketTimes:
    """The measured times of batches, and times of other shapes that follow from them."""

    times: tuple[BucketTime, ...]
    """Times that do not fall with the length or the rows, as `build_bucket_times` returns them."""
    threads: int
    """CPU threads of the measurement."""
    chip: str
    """Name of the chip of the measurement."""

    def milliseconds(self, length: int, rows: int) -> float:
        """Return the time of a batch of `rows` rows of `length` tokens.

        A measured shape has its measured time. Others are interpolated, linear in the rows and in
        the length. Beyond the largest shape, a time is proportional to the tokens. A longer batch,
        or one with more rows, never takes less time.
        """
        lengths = [curve.length for curve in self._curves]
        after = bisect_left(lengths, length)
        if after == len(lengths):
            return self._milliseconds_at(after - 1, rows) * (length / lengths[-1])
        upper = self._milliseconds_at(after, rows)
        if after == 0 or lengths[after] == length:
            return upper
        lower = self._milliseconds_at(after - 1, rows)
        fraction = (length - lengths[after - 1]) / (lengths[after] - lengths[after - 1])
        return lower + (upper - lower) * fraction

    @cached_property
    def _curves(self) -> list[_LengthCurve]:
        return _build_curves(self.times)

    def _milliseconds_at(self, index: int, rows: int) -> float:
        """Return the time of rows of a measured length, at least the time of each shorter one."""
        return max(curve.milliseconds(rows) for curve in self._curves[: index + 1])


@dataclass(frozen=True)
class _LengthCurve:
    """The times of one length by rows."""

    length: int
    rows: list[int]
    """Measured numbers of rows, in ascending order."""
    times: list[float]
    """Milliseconds of each, in ascending order."""

    def milliseconds(self, rows: int) -> float:
        """Return the time of a number of rows; proportional beyond the largest measured one."""
        after = bisect_right(self.rows, rows)
        if after == 0:
            return self.times[0]
        if after == len(self.rows):
            return self.times[-1] * (rows / self.rows[-1])
        start, end = self.rows[after - 1], self.rows[after]
        fraction = (rows - start) / (end - start)
        return self.times[after - 1] + (self.times[after] - self.times[after - 1]) * fraction


def _build_curves(times: Iterable[BucketTime]) -> list[_LengthCurve]:
    """Return the curves of all lengths, in ascending order of length."""
    by_length: dict[int, list[BucketTime]] = {}
    for item in sorted(times, key=lambda item: (item.length, item.rows)):
        by_length.setdefault(item.length, []).append(item)
    return [
        _LengthCurve(length, [item.rows for item in items], [item.milliseconds for item in items])
        for length, items in by_length.items()
    ]


def build_bucket_times(times: Iterable[BucketTime], *, threads: int, chip: str) -> BucketTimes:
    """Return measured times, each raised to the times of smaller batches.

    Noise may make a larger batch faster than a smaller one. A scheduler needs times that do not
    fall. Each shape may occur once.
    """
    raised: list[BucketTime] = []
    curves: list[_LengthCurve] = []
    for curve in _build_curves(times):
        least = 0.0
        knots: list[float] = []
        for rows, milliseconds in zip(curve.rows, curve.times, strict=True):
            shorter = max((other.milliseconds(rows) for other in curves), default=0.0)
            least = max(least, milliseconds, shorter)
            knots.append(least)
            raised.append(BucketTime(length=curve.length, rows=rows, milliseconds=least))
        curves.append(_LengthCurve(curve.length, curve.rows, knots))
    return BucketTimes(tuple(raised), threads, chip)


def measure_bucket_times(
    runner: Runner,
    buckets: Sequence[Bucket],
    inputs: Sequence[TensorSpec],
    *,
    seconds: float,
    has_dynamic_shapes: bool,
    threads: int,
    chip: str,
) -> BucketTimes:
    """Return the times of the batches of a runner, each the median of several runs.

    `inputs` are the tensors of the program. With `has_dynamic_shapes` a grid of shapes is measured
    for about `seconds`: its corners always, then the smallest batches first. Otherwise every
    declared shape is measured. A shape for which memory runs out is left out.
    """
    required, optional = _list_shapes(buckets, has_dynamic_shapes=has_dynamic_shapes)
    deadline = time.perf_counter() + seconds
    times: list[BucketTime] = []
    _run(runner, inputs, *min(required))  # the first call prepares the weights
    for index, (length, rows) in enumerate([*required, *optional]):
        stop_signals.check_stop()
        if index >= len(required) and time.perf_counter() >= deadline:
            break
        with _skip_without_memory():
            milliseconds = _measure(runner, inputs, length, rows)
            times.append(BucketTime(length=length, rows=rows, milliseconds=milliseconds))
    return build_bucket_times(times, threads=threads, chip=chip)


def _list_shapes(
    buckets: Sequence[Bucket], *, has_dynamic_shapes: bool
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the (length, rows) that are always measured, and the others by their tokens."""
    if not has_dynamic_shapes:
        return [(item.length, rows) for item in buckets for rows in item.batch_sizes], []
    ends = (buckets[0], buckets[-1])
    corners = [
        (item.length, rows) for item in ends for rows in (item.batch_sizes[-1], item.batch_sizes[0])
    ]
    required = list(dict.fromkeys(corners))
    grid = [(item.length, rows) for item in _spread_buckets(buckets) for rows in item.batch_sizes]
    optional = [shape for shape in grid if shape not in required]
    return required, sorted(optional, key=lambda shape: (shape[0] * shape[1], shape))


def _spread_buckets(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return buckets whose lengths are spread evenly by ratio, with the first and the last one."""
    lengths = np.log([bucket.length for bucket in buckets])
    targets = np.linspace(lengths[0], lengths[-1], MAX_GRID_LENGTHS)
    nearest = {int(np.abs(lengths - target).argmin()) for target in targets}
    return [buckets[index] for index in sorted(nearest)]


def _measure(runner: Runner, inputs: Sequence[TensorSpec], length: int, rows: int) -> float:
    """Return the median milliseconds of a shape; one slow first run does not change a median."""
    durations = [_run(runner, inputs, length, rows) for _ in range(MIN_RUNS)]
    return 1e3 * statistics.median(durations)


@contextmanager
def _skip_without_memory() -> Iterator[None]:
    """End a block early if memory runs out in it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise


def _run(runner: Runner, inputs: Sequence[TensorSpec], length: int, rows: int) -> float:
    """Return the seconds of a batch, with the copy of its outputs to the host."""
    tensors = example_inputs(inputs, rows, length)
    for spec, tensor in zip(inputs, tensors, strict=True):
        if spec.name == "lengths":
            tensor.fill_(length)
    start = time.perf_counter()
    runner(*tensors).cpu()
    return time.perf_counter() - start


def write_bucket_times(folder: Path, times: BucketTimes) -> None:
    """Write the times into the folder of an artifact."""
    document = {
        "format": FORMAT,
        "threads": times.threads,
        "chip": times.chip,
        "times": [item.model_dump() for item in times.times],
    }
    write_json(folder / BUCKET_TIMES, document)


def read_bucket_times(artifact: Artifact) -> BucketTimes | None:
    """Return the times of an artifact; None if it has none, as one of an older version.

    Raises DataError if the file is damaged.
    """
    if BUCKET_TIMES not in artifact.manifest.files:
        return None
    document = read_json(artifact.folder / BUCKET_TIMES, REMEDY, BucketTimesShape)
    shape = BucketTimesShape.model_validate(document)
    return build_bucket_times(shape.times, threads=shape.threads, chip=shape.chip)
