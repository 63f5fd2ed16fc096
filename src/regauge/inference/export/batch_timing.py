"""Measures batch times in milliseconds by shape."""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING

from regauge.inference.backends import to_array
from regauge.inference.export.bucket_times import BucketTime, BucketTimes
from regauge.inference.export.buckets import spread_buckets
from regauge.inference.export.engine import is_out_of_memory
from regauge.models.io_spec import build_example_arrays
from regauge.system import stop_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.inference.backends import Runner
    from regauge.inference.export.manifest import Bucket
    from regauge.models.io_spec import TensorSpec

MAX_GRID_LENGTHS = 8
"""Maximum lengths in the grid, for a program without static shapes."""
SLOW_SECONDS = 0.05
"""Batch time above which noise is small."""
MIN_RUNS = 3
"""Timings per shape; the median counts, so a first run with compilation does not."""


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
    """Return a runner's batch times, each the median of several runs.

    `inputs` are the program's tensors. With `has_dynamic_shapes`, measures a grid of shapes in
    addition to its corners, for about `seconds`, the smallest batches first. Otherwise measures
    every declared shape. A shape for which memory runs out is left out.
    """
    required, optional = _list_shapes(buckets, has_dynamic_shapes=has_dynamic_shapes)
    deadline = math.inf
    times: list[BucketTime] = []
    _run(runner, inputs, *min(required))  # the first call prepares the weights
    for index, (length, rows) in enumerate([*required, *optional]):
        stop_signals.check_stop()
        if index == len(required):
            deadline = time.perf_counter() + seconds
        if time.perf_counter() >= deadline:
            break
        try:
            milliseconds = _measure(runner, inputs, length, rows)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            continue
        times.append(BucketTime(length=length, rows=rows, milliseconds=milliseconds))
    return BucketTimes(times=times, threads=threads, chip=chip)


def _list_shapes(
    buckets: Sequence[Bucket], *, has_dynamic_shapes: bool
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the (length, rows) to measure always, and the others by tokens."""
    if not has_dynamic_shapes:
        return [(item.length, rows) for item in buckets for rows in item.batch_sizes], []
    ends = (buckets[0], buckets[-1])
    corners = [
        (item.length, rows) for item in ends for rows in (item.batch_sizes[-1], item.batch_sizes[0])
    ]
    required = list(dict.fromkeys(corners))
    spread = spread_buckets(buckets, MAX_GRID_LENGTHS)
    grid = [(item.length, rows) for item in spread for rows in item.batch_sizes]
    optional = [shape for shape in grid if shape not in required]
    return required, sorted(optional, key=lambda shape: (shape[0] * shape[1], shape))


def _measure(runner: Runner, inputs: Sequence[TensorSpec], length: int, rows: int) -> float:
    """Return a shape's median milliseconds; one slow first run does not change a median.

    A slow shape is run twice, and the shorter time counts.
    """
    durations = [_run(runner, inputs, length, rows) for _ in range(MIN_RUNS - 1)]
    if min(durations) >= SLOW_SECONDS:
        return 1e3 * min(durations)
    return 1e3 * statistics.median([*durations, _run(runner, inputs, length, rows)])


def _run(runner: Runner, inputs: Sequence[TensorSpec], length: int, rows: int) -> float:
    """Return the seconds for a batch, including copying outputs to the host."""
    arrays = build_example_arrays(inputs, rows, length)
    for spec, array in zip(inputs, arrays, strict=True):
        if spec.name == "lengths":
            array.fill(length)
    start = time.perf_counter()
    to_array(runner(*arrays))
    return time.perf_counter() - start
