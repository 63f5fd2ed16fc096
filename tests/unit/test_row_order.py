"""Numbers that are a function of their key: permutations, draws, and the rows of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.data.batches import Piece, whole_rows
from regauge.data.loader import Share
from regauge.data.randomness import Permutation, keyed
from regauge.data.row_order import PADDING, Order, sample

IDENTITY = "0123456789abcdef" * 4
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 4097)


@pytest.mark.parametrize("size", SIZES)
def test_a_permutation_takes_every_value_once(size: int) -> None:
    values = Permutation(size, 7, 3)(np.arange(size))
    assert np.array_equal(np.sort(values), np.arange(size))


@given(size=st.integers(1, 3000), key=st.integers(0, 2**40), data=st.data())
def test_a_position_alone_has_the_value_it_has_among_all(
    size: int, key: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, size - 1))
    permutation = Permutation(size, key)
    every = permutation(np.arange(size))
    assert permutation(np.array([position]))[0] == every[position]
    assert np.array_equal(np.sort(every), np.arange(size))


def test_neighbours_do_not_stay_neighbours() -> None:
    size = 10_000
    values = Permutation(size, 1)(np.arange(size))
    assert abs(np.corrcoef(values, np.arange(size))[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(values)) == 1) < 0.002  # 2 / size is expected


def test_every_part_of_a_key_matters() -> None:
    words = {int(keyed(*key)) for key in ((1, 2), (2, 1), (1, 2, 0), (0, 1, 2), (1,), (-1, 2))}
    assert len(words) == 6
    rows, places = np.arange(5)[:, None], np.arange(7)
    table = keyed(3, rows, places)
    assert table.shape == (5, 7)
    assert len(np.unique(table)) == 35
    assert int(table[2, 4]) == int(keyed(3, 2, 4))


def test_words_are_uniform() -> None:
    words = keyed(5, np.arange(40_000))
    bits = (words[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(40_000)


@pytest.mark.parametrize(("rows", "batch"), [(1, 4), (8, 4), (9, 4), (43, 8)])
def test_an_epoch_holds_each_row_once(rows: int, batch: int) -> None:
    order = Order(rows, batch, 3, IDENTITY)
    assert order.steps_per_epoch == -(-rows // batch)
    epochs = []
    for epoch in (0, 1):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        assert {order.epoch(step) for step in steps} == {epoch}
        batches = [order.batch(step) for step in steps]
        assert all(len(each) == batch for each in batches)
        seen = np.concatenate(batches)
        epochs.append(seen[seen != PADDING].tolist())
        assert sorted(epochs[-1]) == list(range(rows))
        assert (seen == PADDING).sum() == -rows % batch
    assert rows == 1 or epochs[0] != epochs[1]


def test_seed_and_content_change_the_order_and_nothing_else_does() -> None:
    batches = [
        Order(500, 50, seed, identity).batch(3).tolist()
        for seed, identity in ((1, IDENTITY), (2, IDENTITY), (1, "f" + IDENTITY[1:]))
    ]
    assert batches[0] != batches[1] != batches[2] != batches[0]
    assert Order(500, 50, 1, IDENTITY).batch(3).tolist() == batches[0]


def test_a_sample_of_a_split_is_the_beginning_of_a_larger_one() -> None:
    few, many = sample(100, 10, IDENTITY), sample(100, 30, IDENTITY)
    assert few.tolist() == many[:10].tolist() != list(range(10))
    assert sorted(sample(100, None, IDENTITY).tolist()) == list(range(100))
    assert len(sample(5, 10, IDENTITY)) == 5
    assert len(sample(0, None, IDENTITY)) == 0


@given(pieces=st.integers(1, 12), size=st.integers(1, 6))
def test_every_piece_is_one_process_s_and_all_have_equally_many(pieces: int, size: int) -> None:
    whole = whole_rows(np.arange(2 * pieces), 2, 16)
    shares = [Share(rank, size).of(whole, (8, 16)) for rank in range(size)]
    assert {len(share) for share in shares} == {-(-pieces // size)}
    real = [piece for share in shares for piece in share if (piece.rows != PADDING).any()]
    assert sorted(int(piece.rows[0]) for piece in real) == list(range(0, 2 * pieces, 2))
    empty = [piece for share in shares for piece in share if (piece.rows == PADDING).all()]
    assert all(piece.length == 8 and len(piece.rows) == 2 for piece in empty)


def test_an_emptied_piece_has_the_size_of_the_full_one() -> None:
    piece = Piece(np.array([4, 9]), np.array([0, 1]), np.array([2, 3]), 16)
    empty = piece.emptied(8)
    assert empty.rows.tolist() == [PADDING, PADDING]
    assert (empty.parts.tolist(), empty.slots.tolist(), empty.length) == ([0, 0], [0, 0], 8)
