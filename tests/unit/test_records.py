"""Tokenized records and their batches, compared with loops over records and tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.inference.export.buckets import BucketBatch
from regauge.inference.export.records import TensorRecords, TextRecords, TokenizedTexts

Ids = list[int]
IDS = st.lists(st.integers(1, 2**31 - 1), max_size=7)
RECORDS = st.integers(1, 3).flatmap(
    lambda count_texts: st.lists(
        st.lists(IDS, min_size=count_texts, max_size=count_texts), max_size=6
    )
)
"""Records that all have the same number of texts; a text may be empty."""


def arrays(lists: list[Ids]) -> list[np.ndarray]:
    return [np.array(ids, np.int32) for ids in lists]


def build_records(records: list[list[Ids]], num_texts: int = 1, features: Any = ()) -> TextRecords:
    columns = [[record[text] for record in records] for text in range(num_texts)]
    return TextRecords([TokenizedTexts.from_lists(arrays(column)) for column in columns], features)


def count_texts(records: list[list[Ids]]) -> int:
    return len(records[0]) if records else 1


def longest(records: list[list[Ids]]) -> list[int]:
    return [max(map(len, record)) for record in records]


@given(records=RECORDS, data=st.data())
def test_a_batch_equals_the_result_of_a_loop_over_its_records(
    records: list[list[Ids]], data: st.DataObject
) -> None:
    count = count_texts(records)
    members = data.draw(st.permutations(range(len(records))))
    members = members[: data.draw(st.integers(0, len(members)))]
    length = max([1, *longest(records)]) + data.draw(st.integers(0, 3))
    batch = BucketBatch(
        length, len(members) + data.draw(st.integers(0, 3)), np.array(members, dtype=np.int64)
    )
    tokens = np.zeros((batch.num_rows, count, length), np.int32)
    lengths = np.zeros((batch.num_rows, count), np.int32)
    for row, member in enumerate(members):
        for text, ids in enumerate(records[member]):
            lengths[row, text] = len(ids)
            for position, token in enumerate(ids):
                tokens[row, text, position] = token
    inputs = build_records(records, count).build_inputs(batch)
    expected = (tokens, lengths) if count > 1 else (tokens[:, 0], lengths[:, 0])
    assert len(inputs) == 2
    for tensor, array in zip(inputs, expected, strict=True):
        assert tensor.dtype == np.int32
        np.testing.assert_array_equal(tensor, array)


@given(records=RECORDS, data=st.data())
def test_selected_records_equal_records_built_alone(
    records: list[list[Ids]], data: st.DataObject
) -> None:
    count = count_texts(records)
    index = st.integers(0, max(0, len(records) - 1))
    members = data.draw(st.lists(index, max_size=6 if records else 0))
    features = (np.arange(len(records)) * 1.5, np.arange(2 * len(records)).reshape(-1, 2))
    original = build_records(records, count, features)
    selected = original.select(np.array(members, dtype=np.int64))
    alone = build_records([records[member] for member in members], count)
    assert len(selected) == len(members)
    assert selected.lengths.tolist() == longest([records[member] for member in members])
    assert selected.num_tokens == alone.num_tokens
    for texts, expected in zip(selected.texts, alone.texts, strict=True):
        assert texts.ids.tolist() == expected.ids.tolist()
        assert texts.lengths.tolist() == expected.lengths.tolist()
    assert selected.features[0].tolist() == [member * 1.5 for member in members]
    assert selected.features[1].tolist() == [[2 * member, 2 * member + 1] for member in members]


@given(records=RECORDS)
def test_tokens_and_lengths_are_counted(records: list[list[Ids]]) -> None:
    text_records = build_records(records, count_texts(records))
    assert len(text_records) == len(records)
    assert text_records.lengths.tolist() == longest(records)
    assert text_records.num_tokens == sum(len(ids) for record in records for ids in record)


def test_features_follow_the_texts_in_the_order_of_the_batch() -> None:
    starts = np.array([1, 2, 3], np.int32)
    numbers = np.array([[0.5, np.nan], [1.5, 2.5], [3.5, 4.5]], np.float32)
    records = build_records([[[1]], [[2, 2]], [[3, 3, 3]]], 1, (starts, numbers))
    tokens, lengths, first, second = records.build_inputs(BucketBatch(4, 3, np.array([2, 0])))
    assert tokens.tolist() == [[3, 3, 3, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert lengths.tolist() == [3, 1, 0]
    assert (first.tolist(), first.dtype) == ([3, 1, 0], np.int32)
    assert second.dtype == np.float32
    assert second[0].tolist() == [3.5, 4.5]
    assert second[1, 0] == 0.5
    assert np.isnan(second[1, 1])
    assert second[2].tolist() == [0.0, 0.0]


def test_a_batch_is_a_copy_of_its_records() -> None:
    records = TextRecords.from_lists(arrays([[1, 2], [3]]))
    tokens, lengths = records.build_inputs(BucketBatch(2, 2, np.array([0, 1])))
    tokens[:] = lengths[:] = 0
    second_inputs = records.build_inputs(BucketBatch(2, 2, np.array([0, 1])))
    assert second_inputs[0].tolist() == [[1, 2], [3, 0]]
    assert second_inputs[1].tolist() == [2, 1]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ids_of_any_integer_type_become_int32(dtype: Any) -> None:
    texts = TokenizedTexts.from_lists([np.array([7, 8], dtype), np.array([9], dtype)])
    assert texts.ids.dtype == np.int32
    assert texts.ids.tolist() == [7, 8, 9]
    assert texts.starts.tolist() == [0, 2]


def test_records_may_be_empty() -> None:
    no_records = TextRecords.from_lists([])
    assert (len(no_records), no_records.num_tokens, no_records.lengths.tolist()) == (0, 0, [])
    tokens, lengths = no_records.build_inputs(BucketBatch(3, 2, np.empty(0, np.int64)))
    assert tokens.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert lengths.tolist() == [0, 0]


def test_tensor_records_are_padded_with_zero_rows() -> None:
    images = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    records = TensorRecords([images, np.array([5, 6, 7, 8], np.int64)])
    assert (len(records), records.num_tokens, records.texts_per_record) == (4, 4, 1)
    assert records.lengths.tolist() == [1, 1, 1, 1]
    first, second = records.build_inputs(BucketBatch(1, 3, np.array([3, 0])))
    assert first.tolist() == [images[3].tolist(), images[0].tolist(), [[0, 0], [0, 0], [0, 0]]]
    assert second.tolist() == [8, 5, 0]
    assert second.dtype == np.int64
    selected = records.select(np.array([2, 2, 1]))
    pixels, numbers = selected.build_inputs(BucketBatch(1, 3, np.arange(3)))
    assert pixels.tolist() == images[[2, 2, 1]].tolist()
    assert numbers.tolist() == [7, 7, 6]
