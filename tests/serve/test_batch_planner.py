"""The next batch is the most efficient one of all batches with the first record of the queue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.serving.batch_planner import MIN_LIMITED_FACTOR, BatchPlanner, PlannedBatch
from serve.simulation import AffineTimes, build_buckets


class Item(NamedTuple):
    """A record of a queue."""

    length: int


LENGTHS = (4, 8, 16, 32)
QUEUES = st.lists(st.sampled_from(LENGTHS).map(Item), min_size=1, max_size=9)
TIMES = st.builds(
    AffineTimes,
    st.floats(0.01, 20, allow_nan=False),
    st.floats(0.001, 1, allow_nan=False),
)
MAX_TOKENS = st.sampled_from([32, 48, 96, 256])
LIMITS = st.one_of(st.just(math.inf), st.floats(0.1, 100))


def build_planner(
    times: AffineTimes, max_tokens: int, *, mixes_lengths: bool = True, pads_rows: bool = False
) -> BatchPlanner:
    buckets = build_buckets(LENGTHS, max_tokens, needs_row_padding=pads_rows)
    return BatchPlanner(buckets, times, mixes_lengths=mixes_lengths)


def measure_efficiency(
    planner: BatchPlanner, queue: Sequence[Item], indices: Sequence[int], milliseconds: float
) -> float:
    return sum(planner.cost(queue[index].length) for index in indices) / milliseconds


def find_best_efficiency(
    planner: BatchPlanner, queue: Sequence[Item], max_tokens: int, limit_ms: float
) -> float:
    """Return the best efficiency of all batches with the first record, by trying them all."""
    best = 0.0
    for count in range(len(queue)):
        for others in combinations(range(1, len(queue)), count):
            indices = (0, *others)
            length = max(queue[index].length for index in indices)
            if len(indices) > max(1, max_tokens // length):
                continue
            milliseconds = planner.milliseconds(length, len(indices))
            limit = max(limit_ms, MIN_LIMITED_FACTOR * planner.milliseconds(length, 1))
            if milliseconds <= limit or count == 0:
                best = max(best, measure_efficiency(planner, queue, indices, milliseconds))
    return best


def check_batch(
    planner: BatchPlanner, queue: Sequence[Item], batch: PlannedBatch, max_tokens: int
) -> None:
    assert batch.indices == sorted(set(batch.indices))
    assert batch.indices[0] == 0
    assert batch.length in LENGTHS
    assert all(queue[index].length <= batch.length for index in batch.indices)
    assert len(batch.indices) <= max(1, max_tokens // batch.length)
    assert batch.milliseconds == planner.milliseconds(batch.length, len(batch.indices))


@given(queue=QUEUES, times=TIMES, max_tokens=MAX_TOKENS, limit_ms=LIMITS, pads_rows=st.booleans())
def test_no_batch_with_the_first_record_is_more_efficient(
    queue: list[Item], times: AffineTimes, max_tokens: int, limit_ms: float, *, pads_rows: bool
) -> None:
    planner = build_planner(times, max_tokens, pads_rows=pads_rows)
    batch = planner.plan(queue, limit_ms)
    check_batch(planner, queue, batch, max_tokens)
    efficiency = measure_efficiency(planner, queue, batch.indices, batch.milliseconds)
    best = find_best_efficiency(planner, queue, max_tokens, limit_ms)
    assert efficiency == pytest.approx(best)


@given(
    queue=QUEUES,
    times=TIMES,
    max_tokens=MAX_TOKENS,
    limit_ms=st.floats(0.1, 100),
    mixes_lengths=st.booleans(),
)
def test_a_limited_batch_takes_at_most_the_limit_or_two_records(
    queue: list[Item],
    times: AffineTimes,
    max_tokens: int,
    limit_ms: float,
    *,
    mixes_lengths: bool,
) -> None:
    planner = build_planner(times, max_tokens, mixes_lengths=mixes_lengths)
    batch = planner.plan(queue, limit_ms)
    check_batch(planner, queue, batch, max_tokens)
    single = planner.milliseconds(batch.length, 1)
    assert batch.milliseconds <= max(limit_ms, MIN_LIMITED_FACTOR * single)


@given(queue=QUEUES, times=TIMES, max_tokens=MAX_TOKENS, limit_ms=LIMITS, pads_rows=st.booleans())
def test_without_mixing_all_records_of_a_batch_have_its_length(
    queue: list[Item], times: AffineTimes, max_tokens: int, limit_ms: float, *, pads_rows: bool
) -> None:
    planner = build_planner(times, max_tokens, mixes_lengths=False, pads_rows=pads_rows)
    batch = planner.plan(queue, limit_ms)
    check_batch(planner, queue, batch, max_tokens)
    assert batch.length == queue[0].length
    assert {queue[index].length for index in batch.indices} == {queue[0].length}
    if limit_ms == math.inf and not pads_rows:
        equal = sum(item.length == batch.length for item in queue)
        assert len(batch.indices) == min(equal, max(1, max_tokens // batch.length))


@given(QUEUES, TIMES)
def test_a_padded_batch_costs_as_much_as_the_next_declared_size(
    queue: list[Item], times: AffineTimes
) -> None:
    planner = build_planner(times, 256, pads_rows=True)
    batch = planner.plan(queue, math.inf)
    rows = len(batch.indices)
    declared = 1 << (rows - 1).bit_length()
    assert batch.milliseconds == pytest.approx(times.milliseconds(batch.length, declared))


def test_a_long_record_does_not_lengthen_a_batch_of_short_ones() -> None:
    planner = build_planner(AffineTimes(0.1, 0.1), 256)
    queue = [Item(4), Item(32), *[Item(4)] * 6]
    batch = planner.plan(queue, math.inf)
    assert (batch.length, batch.indices) == (4, [0, 2, 3, 4, 5, 6, 7])


def test_short_records_fill_a_batch_whose_fixed_cost_is_high() -> None:
    planner = build_planner(AffineTimes(20, 0.01), 256)
    queue = [Item(32), Item(4), Item(8)]
    assert planner.plan(queue, math.inf).indices == [0, 1, 2]
