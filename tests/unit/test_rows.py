"""Records as a program takes them, against a loop over records and tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regauge.artifacts.buckets import BucketBatch
from regauge.artifacts.rows import Rows, Tensors, Texts

Ids = list[int]
IDS = st.lists(st.integers(1, 2**31 - 1), max_size=7)
RECORDS = st.integers(1, 3).flatmap(
    lambda several: st.lists(st.lists(IDS, min_size=several, max_size=several), max_size=6)
)
"""Some records with as many texts each, which may be empty."""


def arrays(lists: list[Ids]) -> list[np.ndarray]:
    return [np.array(ids, np.int32) for ids in lists]


def rows(records: list[list[Ids]], several: int = 1, features: Any = ()) -> Rows:
    every = [[record[text] for record in records] for text in range(several)]
    return Rows([Texts.of(arrays(column)) for column in every], features)


def several(records: list[list[Ids]]) -> int:
    return len(records[0]) if records else 1


def longest(records: list[list[Ids]]) -> list[int]:
    return [max(map(len, record)) for record in records]


@given(records=RECORDS, data=st.data())
def test_a_batch_is_what_a_loop_makes_of_its_records(
    records: list[list[Ids]], data: st.DataObject
) -> None:
    count = several(records)
    members = data.draw(st.permutations(range(len(records))))
    members = members[: data.draw(st.integers(0, len(members)))]
    length = max([1, *longest(records)]) + data.draw(st.integers(0, 3))
    batch = BucketBatch(
        length, len(members) + data.draw(st.integers(0, 3)), np.array(members, dtype=np.int64)
    )
    tokens = np.zeros((batch.rows, count, length), np.int32)
    lengths = np.zeros((batch.rows, count), np.int32)
    for row, member in enumerate(members):
        for text, ids in enumerate(records[member]):
            lengths[row, text] = len(ids)
            for place, token in enumerate(ids):
                tokens[row, text, place] = token
    found = rows(records, count).inputs(batch)
    wanted = (tokens, lengths) if count > 1 else (tokens[:, 0], lengths[:, 0])
    assert len(found) == 2
    for made, array in zip(found, wanted, strict=True):
        assert made.dtype == torch.int32
        np.testing.assert_array_equal(made.numpy(), array)


@given(records=RECORDS, data=st.data())
def test_some_records_are_those_records_alone(
    records: list[list[Ids]], data: st.DataObject
) -> None:
    count = several(records)
    places = st.lists(st.integers(0, max(0, len(records) - 1)), max_size=6 if records else 0)
    members = data.draw(places)
    features = (np.arange(len(records)) * 1.5, np.arange(2 * len(records)).reshape(-1, 2))
    whole = rows(records, count, features)
    found = whole.some(np.array(members, dtype=np.int64))
    alone = rows([records[member] for member in members], count)
    assert len(found) == len(members)
    assert found.lengths.tolist() == longest([records[member] for member in members])
    assert found.tokens == alone.tokens
    for made, wanted in zip(found.texts, alone.texts, strict=True):
        assert made.ids.tolist() == wanted.ids.tolist()
        assert made.lengths.tolist() == wanted.lengths.tolist()
    assert found.features[0].tolist() == [member * 1.5 for member in members]
    assert found.features[1].tolist() == [[2 * member, 2 * member + 1] for member in members]


@given(records=RECORDS)
def test_tokens_and_lengths_are_counted(records: list[list[Ids]]) -> None:
    found = rows(records, several(records))
    assert len(found) == len(records)
    assert found.lengths.tolist() == longest(records)
    assert found.tokens == sum(len(ids) for record in records for ids in record)


def test_features_stand_behind_the_texts_in_the_order_of_the_batch() -> None:
    starts = np.array([1, 2, 3], np.int32)
    numbers = np.array([[0.5, np.nan], [1.5, 2.5], [3.5, 4.5]], np.float32)
    made = rows([[[1]], [[2, 2]], [[3, 3, 3]]], 1, (starts, numbers))
    tokens, lengths, first, second = made.inputs(BucketBatch(4, 3, np.array([2, 0])))
    assert tokens.tolist() == [[3, 3, 3, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert lengths.tolist() == [3, 1, 0]
    assert (first.tolist(), first.dtype) == ([3, 1, 0], torch.int32)
    assert second.dtype == torch.float32
    assert second[0].tolist() == [3.5, 4.5]
    assert second[1, 0] == 0.5
    assert second[1, 1].isnan()
    assert second[2].tolist() == [0.0, 0.0]


def test_a_batch_does_not_change_the_records_that_it_is_made_of() -> None:
    made = Rows.of(arrays([[1, 2], [3]]))
    tokens, lengths = made.inputs(BucketBatch(2, 2, np.array([0, 1])))
    tokens.zero_()
    lengths.zero_()
    again = made.inputs(BucketBatch(2, 2, np.array([0, 1])))
    assert again[0].tolist() == [[1, 2], [3, 0]]
    assert again[1].tolist() == [2, 1]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ids_of_any_integer_type_become_int32(dtype: Any) -> None:
    made = Texts.of([np.array([7, 8], dtype), np.array([9], dtype)])
    assert made.ids.dtype == np.int32
    assert made.ids.tolist() == [7, 8, 9]
    assert made.starts.tolist() == [0, 2]


def test_there_may_be_no_record() -> None:
    nothing = Rows.of([])
    assert (len(nothing), nothing.tokens, nothing.lengths.tolist()) == (0, 0, [])
    tokens, lengths = nothing.inputs(BucketBatch(3, 2, np.empty(0, np.int64)))
    assert tokens.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert lengths.tolist() == [0, 0]


def test_records_of_tensors_are_their_rows_filled_up_with_zeros() -> None:
    images = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    made = Tensors([images, np.array([5, 6, 7, 8], np.int64)])
    assert (len(made), made.tokens, made.apart, made.lengths.tolist()) == (4, 4, 1, [1, 1, 1, 1])
    first, second = made.inputs(BucketBatch(1, 3, np.array([3, 0])))
    assert first.tolist() == [images[3].tolist(), images[0].tolist(), [[0, 0], [0, 0], [0, 0]]]
    assert second.tolist() == [8, 5, 0]
    assert second.dtype == torch.int64
    (some, numbers) = made.some(np.array([2, 2, 1])).inputs(BucketBatch(1, 3, np.arange(3)))
    assert some.tolist() == images[[2, 2, 1]].tolist()
    assert numbers.tolist() == [7, 7, 6]
