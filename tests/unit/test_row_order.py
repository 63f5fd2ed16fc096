"""Stateless randomness: permutations, hashes of keys, and the rows of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.data.batches import MicrobatchPlan, plan_whole_rows
from regauge.data.loader import RankShare
from regauge.data.randomness import Permutation, hash_keys
from regauge.data.row_order import PADDING, RowOrder, sample_rows

IDENTITY = "0123456789abcdef" * 4
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 4097)


@pytest.mark.parametrize("size", SIZES)
def test_a_permutation_has_every_value_once(size: int) -> None:
    values = Permutation(size, 7, 3)(np.arange(size))
    assert np.array_equal(np.sort(values), np.arange(size))


@given(size=st.integers(1, 3000), key=st.integers(0, 2**40), data=st.data())
def test_single_positions_have_the_same_values_as_all(
    size: int, key: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, size - 1))
    permutation = Permutation(size, key)
    every = permutation(np.arange(size))
    assert permutation(np.array([position]))[0] == every[position]
    assert np.array_equal(np.sort(every), np.arange(size))


def test_neighbors_are_separated() -> None:
    size = 10_000
    values = Permutation(size, 1)(np.arange(size))
    assert abs(np.corrcoef(values, np.arange(size))[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(values)) == 1) < 0.002  # 2 / size is expected


def test_every_number_of_a_key_changes_the_hash() -> None:
    words = {int(hash_keys(*key)) for key in ((1, 2), (2, 1), (1, 2, 0), (0, 1, 2), (1,), (-1, 2))}
    assert len(words) == 6
    rows, columns = np.arange(5)[:, None], np.arange(7)
    table = hash_keys(3, rows, columns)
    assert table.shape == (5, 7)
    assert len(np.unique(table)) == 35
    assert int(table[2, 4]) == int(hash_keys(3, 2, 4))


def test_hashes_are_uniform() -> None:
    words = hash_keys(5, np.arange(40_000))
    bits = (words[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(40_000)


@pytest.mark.parametrize(("rows", "batch"), [(1, 4), (8, 4), (9, 4), (43, 8)])
def test_an_epoch_has_every_row_once(rows: int, batch: int) -> None:
    order = RowOrder(rows, batch, 3, IDENTITY)
    assert order.steps_per_epoch == -(-rows // batch)
    epochs = []
    for epoch in (0, 1):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        assert {order.epoch(step) for step in steps} == {epoch}
        batches = [order.batch(step) for step in steps]
        assert all(len(row_numbers) == batch for row_numbers in batches)
        all_numbers = np.concatenate(batches)
        epochs.append(all_numbers[all_numbers != PADDING].tolist())
        assert sorted(epochs[-1]) == list(range(rows))
        assert (all_numbers == PADDING).sum() == -rows % batch
    assert rows == 1 or epochs[0] != epochs[1]


def test_only_seed_and_content_change_the_order() -> None:
    batches = [
        RowOrder(500, 50, seed, identity).batch(3).tolist()
        for seed, identity in ((1, IDENTITY), (2, IDENTITY), (1, "f" + IDENTITY[1:]))
    ]
    assert batches[0] != batches[1] != batches[2] != batches[0]
    assert RowOrder(500, 50, 1, IDENTITY).batch(3).tolist() == batches[0]


def test_a_sample_is_a_prefix_of_a_larger_sample() -> None:
    few, many = sample_rows(100, 10, IDENTITY), sample_rows(100, 30, IDENTITY)
    assert few.tolist() == many[:10].tolist() != list(range(10))
    assert sorted(sample_rows(100, None, IDENTITY).tolist()) == list(range(100))
    assert len(sample_rows(5, 10, IDENTITY)) == 5
    assert len(sample_rows(0, None, IDENTITY)) == 0


@given(num_plans=st.integers(1, 12), size=st.integers(1, 6))
def test_every_microbatch_belongs_to_one_rank_and_all_ranks_have_the_same_number(
    num_plans: int, size: int
) -> None:
    plans = plan_whole_rows(np.arange(2 * num_plans), 2, 16)
    plans_by_rank = [RankShare(rank, size).select(plans, (8, 16)) for rank in range(size)]
    assert {len(local_plans) for local_plans in plans_by_rank} == {-(-num_plans // size)}
    real = [
        plan
        for local_plans in plans_by_rank
        for plan in local_plans
        if (plan.row_numbers != PADDING).any()
    ]
    assert sorted(int(plan.row_numbers[0]) for plan in real) == list(range(0, 2 * num_plans, 2))
    empty = [
        plan
        for local_plans in plans_by_rank
        for plan in local_plans
        if (plan.row_numbers == PADDING).all()
    ]
    assert all(plan.length == 8 and len(plan.row_numbers) == 2 for plan in empty)


def test_an_empty_microbatch_has_the_size_of_the_full_one() -> None:
    plan = MicrobatchPlan(np.array([4, 9]), np.array([0, 1]), np.array([2, 3]), 16)
    empty = plan.build_empty(8)
    assert empty.row_numbers.tolist() == [PADDING, PADDING]
    assert (empty.text_numbers.tolist(), empty.slots.tolist(), empty.length) == ([0, 0], [0, 0], 8)
