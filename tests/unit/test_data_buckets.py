"""Ladders, positions and padding: the few shapes that a run's batches have."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.data.batches import Draw, Piece, dropout_keys, padded, positions
from regauge.data.buckets import MULTIPLE, added, fit, ladder

histograms = st.lists(st.integers(0, 30), min_size=1, max_size=49).filter(any).map(tuple)


def cost(histogram: tuple[int, ...], rungs: tuple[int, ...]) -> int:
    """Return the tokens that all texts take when each is padded to its rung."""
    return sum(count * fit(length, rungs) for length, count in enumerate(histogram) if count)


def longest(histogram: tuple[int, ...]) -> int:
    return max(length for length, count in enumerate(histogram) if count)


@given(histogram=histograms, most=st.integers(1, 4))
def test_no_other_ladder_pads_less(histogram: tuple[int, ...], most: int) -> None:
    found = ladder(histogram, most)
    top = max(MULTIPLE, -(-longest(histogram) // MULTIPLE) * MULTIPLE)
    possible = range(MULTIPLE, top, MULTIPLE)
    every = [(*below, top) for size in range(most) for below in combinations(possible, size)]
    assert cost(histogram, found) == min(cost(histogram, rungs) for rungs in every)
    assert found in every


@given(histogram=histograms)
def test_powers_of_two_pad_no_less(histogram: tuple[int, ...]) -> None:
    powers = [8]
    while powers[-1] < longest(histogram):
        powers.append(2 * powers[-1])
    found = ladder(histogram, len(powers))
    assert cost(histogram, found) <= cost(histogram, tuple(powers))


def test_a_ladder_is_short_and_covers_what_is_there() -> None:
    histogram = tuple(100 if length in (5, 30, 31, 120) else 0 for length in range(128))
    assert ladder(histogram, 1) == (120,)
    assert ladder(histogram, 3) == (8, 32, 120)
    assert ladder(histogram, 8) == (8, 32, 120)
    assert [fit(length, (8, 32, 120)) for length in (1, 8, 9, 120)] == [8, 8, 32, 120]


def test_positions_begin_again_with_each_document() -> None:
    segments = np.array([[1, 1, 1, 2, 2, 3], [1, 2, 2, 2, 0, 0], [0, 0, 0, 0, 0, 0]])
    expected = [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert positions(segments).tolist() == expected
    assert positions(segments).dtype == np.int32


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=5))
def test_positions_of_any_row(rows: list[list[int]]) -> None:
    filled = [[n for n, size in enumerate(row, start=1) for _ in range(size)] for row in rows]
    width = max(len(row) for row in filled)
    segments = np.array([row + [0] * (width - len(row)) for row in filled])
    expected = [[place for size in row for place in range(size)] for row in rows]
    found = positions(segments)
    for row, wanted in zip(found.tolist(), expected, strict=True):
        assert row[: len(wanted)] == wanted


def test_padding_fills_what_no_text_covers() -> None:
    texts = [np.array([5, 6, 7]), None, np.array([8])]
    assert padded(texts, 4, 9).tolist() == [[5, 6, 7, 9], [9, 9, 9, 9], [8, 9, 9, 9]]
    with pytest.raises(ValueError, match="broadcast"):
        padded([np.arange(5)], 4, 0)


def test_dropout_keys_follow_the_text_and_not_its_place() -> None:
    rows, parts, slots = np.array([3, 8, 3, -1]), np.array([0, 0, 1, 0]), np.arange(4)
    keys = dropout_keys(Piece(rows, parts, slots, 16), Draw(1, 0, 5))
    assert keys.dtype == np.int32
    assert len(set(keys.tolist())) == 4
    backwards = Piece(rows[::-1], parts[::-1], slots, 64)
    assert dropout_keys(backwards, Draw(1, 9, 5)).tolist() == keys[::-1].tolist()
    assert (dropout_keys(Piece(rows, parts, slots, 16), Draw(1, 0, 6)) != keys).all()
    assert (dropout_keys(Piece(rows, parts, slots, 16), Draw(2, 0, 5)) != keys).all()


def test_histograms_are_added_to_the_longest() -> None:
    assert added([(1, 2), np.array([0, 1, 5]), ()]).tolist() == [1, 3, 5]
    assert added([]).tolist() == []
