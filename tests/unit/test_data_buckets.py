"""Bucket lengths, position ids, padding and dropout keys."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.data.batches import (
    MicrobatchPlan,
    RandomKey,
    build_dropout_keys,
    build_position_ids,
    pad_sequences,
)
from regauge.data.buckets import (
    LENGTH_MULTIPLE,
    choose_bucket_lengths,
    find_bucket_length,
    joined_text_histogram,
    longest_text_histogram,
    sum_histograms,
)

histograms = st.lists(st.integers(0, 30), min_size=1, max_size=49).filter(any).map(tuple)


def count_padded_tokens(histogram: tuple[int, ...], bucket_lengths: tuple[int, ...]) -> int:
    """Return the number of tokens if each text is padded to its bucket length."""
    return sum(
        find_bucket_length(length, bucket_lengths) * count
        for length, count in enumerate(histogram)
        if count
    )


def find_max_length(histogram: tuple[int, ...]) -> int:
    return max(length for length, count in enumerate(histogram) if count)


@given(histogram=histograms, max_buckets=st.integers(1, 4))
def test_no_other_bucket_lengths_pad_less(histogram: tuple[int, ...], max_buckets: int) -> None:
    chosen = choose_bucket_lengths(histogram, max_buckets)
    top = max(LENGTH_MULTIPLE, -(-find_max_length(histogram) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
    possible = range(LENGTH_MULTIPLE, top, LENGTH_MULTIPLE)
    alternatives = [
        (*below, top) for size in range(max_buckets) for below in combinations(possible, size)
    ]
    assert count_padded_tokens(histogram, chosen) == min(
        count_padded_tokens(histogram, bucket_lengths) for bucket_lengths in alternatives
    )
    assert chosen in alternatives


@given(histogram=histograms)
def test_powers_of_two_pad_no_less(histogram: tuple[int, ...]) -> None:
    powers = [8]
    while powers[-1] < find_max_length(histogram):
        powers.append(2 * powers[-1])
    chosen = choose_bucket_lengths(histogram, len(powers))
    assert count_padded_tokens(histogram, chosen) <= count_padded_tokens(histogram, tuple(powers))


def test_bucket_lengths_are_few_and_cover_the_histogram() -> None:
    histogram = tuple(100 if length in (5, 30, 31, 120) else 0 for length in range(128))
    assert choose_bucket_lengths(histogram, 1) == (120,)
    assert choose_bucket_lengths(histogram, 3) == (8, 32, 120)
    assert choose_bucket_lengths(histogram, 8) == (8, 32, 120)
    assert [find_bucket_length(length, (8, 32, 120)) for length in (1, 8, 9, 120)] == [
        8,
        8,
        32,
        120,
    ]


def test_position_ids_restart_with_each_document() -> None:
    segments = np.array([[1, 1, 1, 2, 2, 3], [1, 2, 2, 2, 0, 0], [0, 0, 0, 0, 0, 0]])
    expected = [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert build_position_ids(segments).tolist() == expected
    assert build_position_ids(segments).dtype == np.int32


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=5))
def test_position_ids_of_random_rows(rows: list[list[int]]) -> None:
    filled = [[n for n, size in enumerate(row, start=1) for _ in range(size)] for row in rows]
    width = max(len(row) for row in filled)
    segments = np.array([row + [0] * (width - len(row)) for row in filled])
    expected = [[position for size in row for position in range(size)] for row in rows]
    position_ids = build_position_ids(segments)
    for row, expected_row in zip(position_ids.tolist(), expected, strict=True):
        assert row[: len(expected_row)] == expected_row


def test_sequences_are_padded() -> None:
    texts = [np.array([5, 6, 7]), None, np.array([8])]
    assert pad_sequences(texts, 4, 9).tolist() == [[5, 6, 7, 9], [9, 9, 9, 9], [8, 9, 9, 9]]
    with pytest.raises(ValueError, match="broadcast"):
        pad_sequences([np.arange(5)], 4, 0)


def test_dropout_keys_depend_on_the_text_and_not_on_its_slot() -> None:
    rows, text_numbers, slots = np.array([3, 8, 3, -1]), np.array([0, 0, 1, 0]), np.arange(4)
    keys = build_dropout_keys(MicrobatchPlan(rows, text_numbers, slots, 16), RandomKey(1, 0, 5))
    assert keys.dtype == np.int32
    assert len(set(keys.tolist())) == 4
    backwards = MicrobatchPlan(rows[::-1], text_numbers[::-1], slots, 64)
    assert build_dropout_keys(backwards, RandomKey(1, 9, 5)).tolist() == keys[::-1].tolist()
    assert (
        build_dropout_keys(MicrobatchPlan(rows, text_numbers, slots, 16), RandomKey(1, 0, 6))
        != keys
    ).all()
    assert (
        build_dropout_keys(MicrobatchPlan(rows, text_numbers, slots, 16), RandomKey(2, 0, 5))
        != keys
    ).all()


def test_summed_histograms_have_the_maximum_length() -> None:
    assert sum_histograms([(1, 2), (0, 1, 5), ()]) == (1, 3, 5)
    assert sum_histograms([]) == ()


counts = st.lists(st.integers(0, 10**6), min_size=1, max_size=40)


@given(first=counts, second=counts)
def test_joined_texts_are_counted_by_their_sum(first: list[int], second: list[int]) -> None:
    """The counts are those of all pairs of a first and a second text, by numpy in exact numbers."""
    pairs = np.convolve(np.array(first, object), np.array(second, object)).tolist()
    total = max(sum(first), 1)
    expected = [max(round(n / total), 1) if n else 0 for n in pairs]
    assert list(joined_text_histogram(first, second)) == expected


def test_rows_are_counted_by_their_longest_text() -> None:
    """Half of the queries have 2 tokens and half 4; a tenth of the documents has 3, the rest 1."""
    assert longest_text_histogram([[0, 0, 50, 0, 50], [0, 90, 0, 10]]) == (0, 1, 45, 5, 50)
    assert longest_text_histogram([[], []]) == (0, 0)
