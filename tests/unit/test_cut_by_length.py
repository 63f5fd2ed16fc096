"""Microbatches that are cut by length: least cost, every text once, and the promised padding."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.data.batches import MicrobatchPlan
from regauge.data.buckets import (
    MICROBATCH_TOKENS,
    BatchForm,
    choose_bucket_lengths,
    count_batch_tokens,
    cut_by_length,
    list_fine_lengths,
)

FINE = list_fine_lengths(512)


def cost(lengths: list[int], edges: list[int]) -> int:
    """Return the cost of parts that end at these positions."""
    starts = [0, *edges[:-1]]
    return sum(
        (end - start) * next(n for n in FINE if n >= lengths[start]) + MICROBATCH_TOKENS
        for start, end in zip(starts, edges, strict=True)
    )


@given(st.lists(st.integers(0, 512), min_size=1, max_size=9))
def test_no_other_cut_costs_less(drawn: list[int]) -> None:
    lengths = sorted(drawn, reverse=True)
    parts = cut_by_length(lengths, FINE)
    assert [start for start, _, _ in parts] == [0, *(end for _, end, _ in parts[:-1])]
    assert parts[-1][1] == len(lengths)
    assert all(length >= lengths[start] for start, _, length in parts)
    inner = range(1, len(lengths))
    every_cut = (
        [*edges, len(lengths)]
        for count in range(len(lengths))
        for edges in combinations(inner, count)
    )
    assert cost(lengths, [end for _, end, _ in parts]) == min(
        cost(lengths, edges) for edges in every_cut
    )


def test_the_parts_of_a_plan_hold_every_text_once() -> None:
    lengths = np.array([40, 12, 11, 3, 3, 0])
    numbers = np.array([7, 3, 9, 1, 2, -1])
    plan = MicrobatchPlan(numbers, np.zeros(6, int), np.arange(6), 40, lengths)
    parts = plan.cut_by_length(FINE)
    assert [part.length for part in parts] == [40, 12, 4]
    assert np.concatenate([part.row_numbers for part in parts]).tolist() == numbers.tolist()
    assert np.concatenate([part.slots for part in parts]).tolist() == list(range(6))


def test_a_plan_of_whole_rows_is_not_cut() -> None:
    plan = MicrobatchPlan(np.arange(4), np.zeros(4, int), np.arange(4), 128)
    assert plan.cut_by_length(FINE) == [plan]


def draw_lengths(median: float, spread: float, longest: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(np.log(median), spread, 20_000).round()
    return np.clip(lengths, 3, longest).astype(int)


@pytest.mark.parametrize(
    ("median", "spread", "longest"),
    [(11, 0.6, 126), (8, 0.35, 64), (120, 0.7, 512), (30, 1.0, 256)],
)
@pytest.mark.parametrize("rows", [32, 128])
def test_batches_of_32_rows_have_at_most_a_tenth_of_padding(
    median: float, spread: float, longest: int, rows: int
) -> None:
    lengths = draw_lengths(median, spread, longest)
    histogram = np.bincount(lengths).tolist()
    buckets = choose_bucket_lengths(histogram, 4)
    computed = real = 0
    for start in range(0, len(lengths) - rows, rows):
        batch = np.sort(lengths[start : start + rows])[::-1].tolist()
        grid = list_fine_lengths(buckets[-1])
        computed += sum((end - begin) * size for begin, end, size in cut_by_length(batch, grid))
        real += sum(batch)
    measured = real / computed
    assert measured >= 0.9
    form = BatchForm(rows, rows, has_any_shape=True)
    expected = lengths.mean() / count_batch_tokens(histogram, buckets, form, 1)
    assert expected == pytest.approx(measured, abs=0.02)


def test_batches_of_one_shape_are_padded_to_their_longest_text() -> None:
    """Four bucket lengths are no help if every batch has a long text."""
    lengths = draw_lengths(11, 0.6, 126)
    histogram = np.bincount(lengths).tolist()
    buckets = choose_bucket_lengths(histogram, 4)
    batches = lengths[: len(lengths) // 32 * 32].reshape(-1, 32).max(1)
    computed = sum(next(size for size in buckets if size >= longest) for longest in batches)
    measured = lengths[: len(batches) * 32].sum() / (32 * computed)
    form = BatchForm(32, 32, has_any_shape=False)
    expected = lengths.mean() / count_batch_tokens(histogram, buckets, form, 1)
    assert expected == pytest.approx(measured, abs=0.02)
    assert measured < 0.5
