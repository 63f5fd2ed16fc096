"""The buckets of an artifact, and the batches that texts of any lengths are split into."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.data.buckets import LENGTH_STEPS
from regauge.inference.export.buckets import (
    NUM_STATIC_BUCKETS,
    ROWS_MULTIPLE,
    BucketBatch,
    Buckets,
    build_buckets,
    list_halves,
    resolve_buckets,
)
from regauge.inference.export.export_settings import BucketSettings
from regauge.inference.export.manifest import Bucket

ROWS = st.integers(1, 40).map(list_halves)


Case = tuple[tuple[Bucket, ...], np.ndarray, int]


@st.composite
def exported_buckets(draw: st.DrawFn) -> tuple[Bucket, ...]:
    """Draw the buckets of an artifact: the batch invariance check may have removed some halves."""
    lengths = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=5)))
    buckets = []
    for length in lengths:
        largest, *halves = draw(ROWS)
        flags = draw(st.lists(st.booleans(), min_size=len(halves), max_size=len(halves)))
        smaller = [rows for rows, is_invariant in zip(halves, flags, strict=True) if is_invariant]
        buckets.append(Bucket(length=length, batch_sizes=(largest, *smaller)))
    return tuple(buckets)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw buckets, the lengths of some texts that fit them, and a number of halvings."""
    buckets = draw(exported_buckets())
    lengths = draw(st.lists(st.integers(0, buckets[-1].length), max_size=90))
    return buckets, np.array(lengths, np.int64), draw(st.integers(0, 7))


def record_indices(batches: list[BucketBatch]) -> list[int]:
    return [int(index) for batch in batches for index in batch.record_indices]


@given(case=cases(), pad=st.booleans())
def test_every_text_is_in_one_batch_of_the_smallest_bucket_that_fits(
    case: Case, *, pad: bool
) -> None:
    buckets, lengths, halvings = case
    batches = list(Buckets(buckets, needs_row_padding=pad).make_batches(lengths, halvings))
    assert sorted(record_indices(batches)) == list(range(len(lengths)))
    for batch in batches:
        assert 0 < len(batch.record_indices) <= batch.num_rows
        for length in lengths[batch.record_indices]:
            fitting = (bucket.length for bucket in buckets if bucket.length >= length)
            assert batch.length == min(fitting)


@given(case=cases(), pad=st.booleans())
def test_longer_texts_come_first_and_equal_lengths_keep_their_order(
    case: Case, *, pad: bool
) -> None:
    buckets, lengths, halvings = case
    batches = Buckets(buckets, needs_row_padding=pad).make_batches(lengths, halvings)
    for before, after in pairwise(record_indices(list(batches))):
        assert (-lengths[before], before) < (-lengths[after], after)


@given(case=cases())
def test_a_padded_batch_has_a_declared_batch_size(case: Case) -> None:
    buckets, lengths, halvings = case
    declared = {bucket.length: bucket.batch_sizes for bucket in buckets}
    padded: set[int] = set()
    for batch in Buckets(buckets, needs_row_padding=True).make_batches(lengths, halvings):
        assert batch.num_rows in (declared[batch.length][halvings:] or declared[batch.length][-1:])
        assert batch.length not in padded, "only the last batch of a length has empty rows"
        if len(batch.record_indices) < batch.num_rows:
            padded.add(batch.length)


@given(case=cases())
def test_an_unpadded_batch_has_no_empty_rows_and_at_most_the_halved_batch_size(case: Case) -> None:
    buckets, lengths, halvings = case
    max_rows = {bucket.length: max(1, bucket.batch_sizes[0] // 2**halvings) for bucket in buckets}
    batches = list(Buckets(buckets, needs_row_padding=False).make_batches(lengths, halvings))
    for batch in batches:
        assert len(batch.record_indices) == batch.num_rows <= max_rows[batch.length]
    for batch, after in pairwise(batches):
        if batch.length == after.length:
            assert batch.num_rows == max_rows[batch.length]


@given(case=cases(), pad=st.booleans(), data=st.data())
def test_selected_texts_are_batched_as_if_there_were_no_others(
    case: Case, data: st.DataObject, *, pad: bool
) -> None:
    shapes, lengths, halvings = case
    selected = (
        data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True))
        if len(lengths)
        else []
    )
    ordered = np.array(sorted(selected), np.int64)
    shuffled = np.array(data.draw(st.permutations(selected)), np.int64)
    buckets = Buckets(shapes, needs_row_padding=pad)
    batches = list(buckets.make_batches(lengths, halvings, shuffled))
    alone = list(buckets.make_batches(lengths[ordered], halvings))
    assert [batch[:2] for batch in batches] == [batch[:2] for batch in alone]
    assert record_indices(batches) == ordered[record_indices(alone)].tolist()


@given(buckets=exported_buckets(), data=st.data())
def test_the_length_of_a_record_is_the_one_of_its_batch(
    buckets: tuple[Bucket, ...], data: st.DataObject
) -> None:
    num_tokens = data.draw(st.integers(0, buckets[-1].length))
    declared = Buckets(buckets, needs_row_padding=False)
    [batch] = declared.make_batches(np.array([num_tokens]))
    assert declared.find_length(num_tokens) == batch.length


def test_a_record_that_is_too_long_has_no_length() -> None:
    buckets = Buckets((Bucket(length=8, batch_sizes=(2, 1)),), needs_row_padding=False)
    with pytest.raises(ValueError, match="a row of 9 tokens is longer than 8"):
        buckets.find_length(9)


@given(buckets=exported_buckets(), halvings=st.integers(0, 7), data=st.data())
def test_chosen_records_stay_in_order_in_batches_of_one_bucket(
    buckets: tuple[Bucket, ...], halvings: int, data: st.DataObject
) -> None:
    bucket = data.draw(st.sampled_from(buckets))
    count = data.draw(st.integers(0, 90))
    indices = np.random.default_rng(count).permutation(100)[:count]
    allowed = bucket.batch_sizes[halvings:] or bucket.batch_sizes[-1:]
    largest = max(1, bucket.batch_sizes[0] >> halvings)
    padded, exact = (
        list(declared.make_bucket_batches(bucket.length, indices, halvings))
        for declared in (Buckets(buckets, needs_row_padding=pad) for pad in (True, False))
    )
    assert record_indices(padded) == record_indices(exact) == indices.tolist()
    assert {batch.length for batch in (*padded, *exact)} <= {bucket.length}
    for batch in padded:
        fitting = [size for size in allowed if size >= len(batch.record_indices)]
        assert batch.num_rows == min(fitting)
    assert all(len(batch.record_indices) == allowed[0] for batch in padded[:-1])
    assert all(batch.num_rows == len(batch.record_indices) for batch in exact)
    assert all(batch.num_rows == largest for batch in exact[:-1])


def test_another_length_than_those_of_the_buckets_has_no_batches() -> None:
    buckets = Buckets((Bucket(length=8, batch_sizes=(2, 1)),), needs_row_padding=True)
    with pytest.raises(ValueError, match="no bucket has a length of 7 tokens"):
        list(buckets.make_bucket_batches(7, np.arange(2)))


@pytest.mark.parametrize("pad", [True, False])
def test_equal_lengths_are_sorted_by_index(*, pad: bool) -> None:
    buckets = Buckets((Bucket(length=8, batch_sizes=(4, 2, 1)),), needs_row_padding=pad)
    batches = buckets.make_batches(np.full(9, 5), record_indices=np.array([7, 3, 8, 1, 5]))
    assert record_indices(list(batches)) == [1, 3, 5, 7, 8]


def test_texts_are_split_into_the_largest_batches_that_cost_least() -> None:
    buckets = Buckets((Bucket(length=8, batch_sizes=(8, 4, 2, 1)),), needs_row_padding=True)
    sizes = [batch.num_rows for batch in buckets.make_batches(np.full(23, 5))]
    assert sizes == [8, 8, 8]
    assert [batch.num_rows for batch in buckets.make_batches(np.full(21, 5))] == [8, 8, 4, 1]
    assert [batch.num_rows for batch in buckets.make_batches(np.full(23, 5), 2)] == [2] * 11 + [1]
    few = Buckets((Bucket(length=8, batch_sizes=(8, 2)),), needs_row_padding=True)
    assert [batch.num_rows for batch in few.make_batches(np.full(23, 5))] == [8, 8, 8]
    static = Buckets((Bucket(length=8, batch_sizes=(8, 1)),), needs_row_padding=True)
    assert [batch.num_rows for batch in static.make_batches(np.full(23, 5))] == [8, 8, 8]
    assert [batch.num_rows for batch in static.make_batches(np.full(19, 5))] == [8, 8, 1, 1, 1]
    dynamic = Buckets((Bucket(length=8, batch_sizes=(8,)),), needs_row_padding=False)
    assert [batch.num_rows for batch in dynamic.make_batches(np.full(23, 5))] == [8, 8, 7]


@pytest.mark.parametrize("pad", [True, False])
def test_a_text_that_no_bucket_fits_is_an_error(*, pad: bool) -> None:
    shapes = (Bucket(length=4, batch_sizes=(2,)), Bucket(length=8, batch_sizes=(2,)))
    buckets = Buckets(shapes, needs_row_padding=pad)
    lengths = np.array([3, 9, 8])
    with pytest.raises(ValueError, match="a row of 9 tokens is longer than 8"):
        list(buckets.make_batches(lengths))
    batches = buckets.make_batches(lengths, record_indices=np.array([0, 2]))
    assert record_indices(list(batches)) == [2, 0]


def test_empty_batches_have_every_declared_shape() -> None:
    shapes = (Bucket(length=8, batch_sizes=(4, 2)), Bucket(length=16, batch_sizes=(2,)))
    buckets = Buckets(shapes, needs_row_padding=True)
    assert [batch[:2] for batch in buckets.make_empty_batches()] == [(8, 4), (8, 2), (16, 2)]
    assert all(len(batch.record_indices) == 0 for batch in buckets.make_empty_batches())
    assert buckets.max_length == 16


@given(
    max_length=st.integers(3, 9000),
    tokens=st.integers(8, 20_000),
    rows=st.integers(1, 600),
    is_dynamic=st.booleans(),
)
def test_buckets_reach_the_longest_text_and_respect_the_token_budget(
    max_length: int, tokens: int, rows: int, *, is_dynamic: bool
) -> None:
    settings = BucketSettings(max_batch_tokens=tokens, max_batch_size=rows)
    buckets = build_buckets(settings, max_length, has_dynamic_shapes=is_dynamic)
    lengths = [bucket.length for bucket in buckets]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == max_length
    for bucket in buckets:
        largest = bucket.batch_sizes[0]
        assert 1 <= largest <= rows
        assert largest == 1 or largest * bucket.length <= tokens
        assert largest < ROWS_MULTIPLE or largest % ROWS_MULTIPLE == 0
        assert largest * 2 >= min(rows, tokens // bucket.length)
        static = tuple(dict.fromkeys((largest, 1)))
        assert bucket.batch_sizes == (list_halves(largest) if is_dynamic else static)


@given(max_length=st.integers(9, 4000))
def test_dynamic_buckets_are_dense_and_static_buckets_are_few(max_length: int) -> None:
    dynamic = build_buckets(BucketSettings(), max_length, has_dynamic_shapes=True)
    lengths = [bucket.length for bucket in dynamic]
    assert lengths[0] == 4
    for before, after in pairwise(lengths):
        assert after - before <= next(step for limit, step in LENGTH_STEPS if before < limit)
    static = build_buckets(BucketSettings(), max_length, has_dynamic_shapes=False)
    lengths = [bucket.length for bucket in static]
    assert len(lengths) <= NUM_STATIC_BUCKETS + 1
    for before, after in pairwise(lengths):
        assert after <= 2 * before + ROWS_MULTIPLE
    smallest = max_length // 2 ** (NUM_STATIC_BUCKETS - 1)
    assert lengths[0] <= max(ROWS_MULTIPLE, smallest + ROWS_MULTIPLE)


@pytest.mark.parametrize(
    ("lengths", "max_length", "expected"),
    [
        ((32, 16), 64, [16, 32, 64]),
        ((16, 64, 128), 64, [16, 64]),
        ((100,), 64, [64]),
        ((64,), 64, [64]),
    ],
)
@pytest.mark.parametrize("is_dynamic", [True, False])
def test_configured_lengths_are_used_up_to_the_longest_text(
    lengths: Any, max_length: int, expected: list[int], *, is_dynamic: bool
) -> None:
    buckets = build_buckets(
        BucketSettings(lengths=lengths), max_length, has_dynamic_shapes=is_dynamic
    )
    assert [bucket.length for bucket in buckets] == expected


@given(rows=st.integers(1, 5000))
def test_halved_row_counts_descend_to_one(rows: int) -> None:
    halves = list_halves(rows)
    assert (halves[0], halves[-1]) == (rows, 1)
    assert all(after == before // 2 for before, after in pairwise(halves))


@pytest.mark.parametrize(("on_host", "expected"), [(True, 2048), (False, 4096)])
def test_the_default_tokens_of_a_batch_depend_on_the_device(
    *, on_host: bool, expected: int
) -> None:
    settings = resolve_buckets(BucketSettings(), 256, on_host=on_host)
    assert settings.max_batch_tokens == expected
    [bucket] = build_buckets(
        settings.model_copy(update={"lengths": (256,)}), 256, has_dynamic_shapes=True
    )
    assert bucket.batch_sizes[0] == expected // 256


def test_settings_override_the_default_buckets() -> None:
    settings = BucketSettings(max_batch_tokens=512, lengths=(16, 64))
    assert resolve_buckets(settings, 256, on_host=True, is_fast=True) == settings


def test_a_fast_export_has_the_lengths_of_static_graphs() -> None:
    settings = resolve_buckets(BucketSettings(), 256, on_host=True, is_fast=True)
    buckets = build_buckets(settings, 256, has_dynamic_shapes=True)
    assert [bucket.length for bucket in buckets] == [8, 16, 32, 64, 128, 256]
    assert buckets[0].batch_sizes == (256, 128, 64, 32, 16, 8, 4, 2, 1)
