"""The times of batches: measured shapes as measured, and times of other shapes that never fall."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from end_to_end.predicting import EAGER, export_run, train_model, update_manifest
from regauge.inference.export import batch_timing
from regauge.inference.export.artifact import open_artifact
from regauge.inference.export.batch_timing import MAX_GRID_LENGTHS, MIN_RUNS, measure_bucket_times
from regauge.inference.export.bucket_times import (
    BucketTime,
    BucketTimes,
    read_bucket_times,
    write_bucket_times,
)
from regauge.inference.export.buckets import build_buckets, list_halves
from regauge.inference.export.engine import load_engine
from regauge.inference.export.export_settings import BucketSettings
from regauge.inference.export.manifest import Bucket
from regauge.models.io_spec import InputSpec, program_inputs
from regauge.system.errors import DataError
from unit.runners import CountingRunner

INPUTS = program_inputs(InputSpec())
BUCKETS = tuple(Bucket(length=length, batch_sizes=list_halves(16)) for length in range(4, 204, 4))


def build(points: dict[tuple[int, int], float]) -> BucketTimes:
    times = [
        BucketTime(length=length, rows=rows, milliseconds=value)
        for (length, rows), value in points.items()
    ]
    return BucketTimes(times=times, threads=2, chip="chip")


POINTS = st.dictionaries(
    st.tuples(st.integers(1, 60), st.integers(1, 40)), st.floats(0.01, 100), min_size=1, max_size=20
)


@given(points=POINTS, length=st.integers(1, 120), rows=st.integers(1, 80))
def test_times_never_fall_with_length_or_rows(
    points: dict[tuple[int, int], float], length: int, rows: int
) -> None:
    times = build(points)
    value = times.milliseconds(length, rows)
    slack = 1 - 1e-9  # an interpolation rounds
    assert times.milliseconds(length + 1, rows) >= value * slack
    assert times.milliseconds(length, rows + 1) >= value * slack
    assert value >= min(points.values()) * slack


@given(points=POINTS)
def test_stored_times_come_out_and_are_at_least_the_measured_ones(
    points: dict[tuple[int, int], float],
) -> None:
    times = build(points)
    assert {(item.length, item.rows) for item in times.times} == points.keys()
    for item in times.times:
        assert times.milliseconds(item.length, item.rows) == item.milliseconds
        assert item.milliseconds >= points[item.length, item.rows]
    assert BucketTimes(times=times.times, threads=2, chip="chip") == times


@given(
    lengths=st.sets(st.integers(1, 300), min_size=1, max_size=6),
    rows=st.sets(st.integers(1, 64), min_size=1, max_size=6),
    overhead=st.floats(0.1, 10),
)
def test_times_that_do_not_fall_come_out_as_measured(
    lengths: set[int], rows: set[int], overhead: float
) -> None:
    points = {
        (length, count): overhead + 0.01 * length * count for length in lengths for count in rows
    }
    times = build(points)
    for (length, count), value in points.items():
        assert times.milliseconds(length, count) == value


def test_other_shapes_are_interpolated_and_extrapolated() -> None:
    times = build({(8, 1): 1.0, (8, 4): 4.0, (16, 1): 3.0, (16, 4): 8.0})
    assert times.milliseconds(8, 2) == 2.0
    assert times.milliseconds(12, 1) == 2.0
    assert times.milliseconds(12, 4) == 6.0
    assert times.milliseconds(16, 8) == 16.0
    assert times.milliseconds(32, 4) == 16.0
    assert times.milliseconds(32, 8) == 32.0
    assert times.milliseconds(1, 1) == 1.0


class LimitedCountingRunner(CountingRunner):
    """Has no memory for more than `max_rows` rows; records the lengths of the texts."""

    def __init__(self, max_rows: int = 1000) -> None:
        super().__init__()
        self.max_rows = max_rows
        self.clock = 0.0
        """Seconds of all batches: 1 ms and 1 µs for each token."""
        self.text_lengths: set[tuple[int, int]] = set()

    def check(self, rows: int, length: int) -> None:
        self.clock += 1e-3 + 1e-6 * rows * length
        if rows > self.max_rows:
            raise RuntimeError("CUDA out of memory")

    def __call__(self, tokens: Tensor, lengths: Tensor, *features: Tensor) -> Tensor:
        self.text_lengths |= {(tokens.shape[1], length) for length in lengths.tolist()}
        return super().__call__(tokens, lengths, *features)


def measure(runner: CountingRunner, seconds: float, *, is_dynamic: bool, **changes: Any) -> Any:
    options: dict[str, Any] = {"buckets": BUCKETS, "inputs": INPUTS, **changes}
    return measure_bucket_times(
        runner,
        options["buckets"],
        options["inputs"],
        seconds=seconds,
        has_dynamic_shapes=is_dynamic,
        threads=1,
        chip="chip",
    )


def list_measured(times: BucketTimes) -> set[tuple[int, int]]:
    return {(item.length, item.rows) for item in times.times}


def test_every_declared_shape_of_a_static_graph_is_measured() -> None:
    runner = LimitedCountingRunner()
    buckets = build_buckets(BucketSettings(max_batch_tokens=512), 64, has_dynamic_shapes=False)
    times = measure(runner, 0.0, is_dynamic=False, buckets=buckets)
    declared = {(item.length, rows) for item in buckets for rows in item.batch_sizes}
    assert list_measured(times) == declared
    counts = {shape: runner.shapes.count(shape) for shape in runner.shapes}
    assert min(counts.values()) >= MIN_RUNS
    assert all(length == text_length for length, text_length in runner.text_lengths)


def test_a_dynamic_graph_is_measured_in_a_spread_grid() -> None:
    times = measure(LimitedCountingRunner(), 60.0, is_dynamic=True)
    lengths = sorted({length for length, _ in list_measured(times)})
    assert (lengths[0], lengths[-1], len(lengths)) == (4, 200, MAX_GRID_LENGTHS)
    assert list_measured(times) == {
        (length, rows) for length in lengths for rows in (16, 8, 4, 2, 1)
    }
    ratios = np.array(lengths[1:]) / np.array(lengths[:-1])
    assert ratios.max() < 2.5


def test_the_corners_are_measured_without_time_for_others() -> None:
    times = measure(LimitedCountingRunner(), 1e-9, is_dynamic=True)
    assert list_measured(times) == {(4, 1), (4, 16), (200, 1), (200, 16)}


def test_a_slow_program_is_measured_in_its_smallest_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = LimitedCountingRunner()
    monkeypatch.setattr(batch_timing, "time", SimpleNamespace(perf_counter=lambda: runner.clock))
    times = measure(runner, 0.08, is_dynamic=True)
    others = sorted(length * rows for length, rows in list_measured(times))[:-1]
    assert 10 < len(times.times) < MAX_GRID_LENGTHS * 5
    assert others[-1] <= 256
    assert 0.08 <= runner.clock < 0.12
    for item in times.times:
        assert item.milliseconds == pytest.approx(1 + 1e-3 * item.length * item.rows)


def test_shapes_without_memory_are_left_out() -> None:
    times = measure(LimitedCountingRunner(max_rows=8), 60.0, is_dynamic=True)
    assert {rows for _, rows in list_measured(times)} == {1, 2, 4, 8}
    with pytest.raises(RuntimeError, match="out of memory"):
        measure(LimitedCountingRunner(max_rows=0), 60.0, is_dynamic=True)


def test_other_errors_of_a_program_are_not_caught() -> None:
    class FailingRunner(CountingRunner):
        def check(self, rows: int, length: int) -> None:
            if rows * length > 4:
                raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        measure(FailingRunner(), 1.0, is_dynamic=True)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    options = (*EAGER, "parity.metrics=false", "buckets.lengths=[8,32]", "parity.stored_rows=0")
    return export_run(train_model(folder), folder / "artifact", *options)


def test_an_export_stores_the_times_of_its_candidate(artifact: Path, tmp_path: Path) -> None:
    opened = open_artifact(artifact)
    times = read_bucket_times(opened)
    assert times is not None
    assert times.threads == 1
    assert times.chip == opened.manifest.target.chip
    ends = (opened.manifest.buckets[0], opened.manifest.buckets[-1])
    corners = {
        (end.length, rows) for end in ends for rows in end.batch_sizes[:: len(end.batch_sizes) - 1]
    }
    assert corners <= list_measured(times)
    engine = load_engine(opened, batch_invariant=True)
    again = measure(
        engine.runner,
        1e-9,
        is_dynamic=True,
        buckets=opened.manifest.buckets,
        inputs=opened.program.inputs,
    )
    assert list_measured(again) == corners
    write_bucket_times(tmp_path, times)
    assert (tmp_path / "bucket_times.json").read_bytes() == (
        artifact / "bucket_times.json"
    ).read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot be read"), ('{"times": [], "threads": 1, "chip": "a"}', "is damaged: 'times'")],
)
def test_a_damaged_or_missing_file(
    artifact: Path, tmp_path: Path, content: str, message: str
) -> None:
    copy = shutil.copytree(artifact, tmp_path / "copy")
    (copy / "bucket_times.json").write_text(content)
    update_manifest(copy)
    with pytest.raises(DataError, match=message):
        read_bucket_times(open_artifact(copy))
    (copy / "bucket_times.json").unlink()
    update_manifest(copy)
    assert read_bucket_times(open_artifact(copy)) is None
