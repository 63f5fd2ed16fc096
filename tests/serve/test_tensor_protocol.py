"""Tensors of the Open Inference Protocol: round trips, and every kind of damage is an error."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from regauge.serving.open_inference.tensor_protocol import (
    DTYPES,
    TEXT,
    InputTensor,
    OutputTensor,
    encode_outputs,
    read_tensors,
)
from regauge.serving.request_errors import InvalidRequestError

SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)


@st.composite
def draw_tensors(draw: st.DrawFn) -> OutputTensor:
    """Draw a tensor of any data type."""
    datatype = draw(st.sampled_from([TEXT, *DTYPES]))
    shape = draw(SHAPES)
    if datatype == TEXT:
        array = np.empty(shape, object)
        for index in np.ndindex(shape):
            array[index] = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=4))
        return OutputTensor("x", TEXT, array)
    dtype = np.dtype(DTYPES[datatype])
    options = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else {}
    elements = hnp.from_dtype(dtype, **options)
    return OutputTensor("x", datatype, draw(hnp.arrays(dtype, shape, elements=elements)))


def decode(body: bytes, length: int | None) -> np.ndarray:
    """Return the tensor of an answer, read as an input of a request."""
    head = orjson.loads(body[:length])
    [item] = head["outputs"]
    binary = b"" if length is None else body[length:]
    return read_tensors([InputTensor.model_validate(item)], binary)["x"]


@given(tensor=draw_tensors(), is_binary=st.booleans())
def test_a_tensor_survives_a_round_trip(*, tensor: OutputTensor, is_binary: bool) -> None:
    if tensor.datatype == "FP16" and not is_binary:  # JSON has no numbers of half precision
        return
    decoded = decode(*encode_outputs({}, [(tensor, is_binary)]))
    assert decoded.shape == tensor.values.shape
    assert decoded.dtype == tensor.values.dtype
    assert np.array_equal(decoded, tensor.values)


def test_nested_data_and_missing_numbers_are_read() -> None:
    item = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2.5], [None, 4]]}
    values = read_tensors([InputTensor.model_validate(item)], b"")["x"]
    np.testing.assert_array_equal(values, np.array([[1, 2.5], [np.nan, 4]], np.float32))


@pytest.mark.parametrize(
    ("fields", "binary", "problem"),
    [
        ({"data": [1, 2]}, b"", "shape [1] does not have 2 values"),
        ({"shape": [-1], "data": [1]}, b"", "shape [-1] does not have 1 values"),
        ({}, b"", "data is missing"),
        ({"data": ["1"]}, b"", "not a number of its data type"),
        ({"data": [None], "datatype": "INT32"}, b"", "not a number of its data type"),
        ({"data": [1.5], "datatype": "INT32"}, b"", "not of data type INT32"),
        ({"data": [1 << 40], "datatype": "INT32"}, b"", "not of data type INT32"),
        ({"data": [10**30], "datatype": "INT64"}, b"", "not a number of its data type"),
        ({"data": [1], "datatype": "FP31"}, b"", "data type 'FP31' is unknown"),
        ({"data": [1], "datatype": TEXT}, b"", "not a text"),
        ({"data": [1]}, b"more", "4 bytes follow the JSON, not 0"),
        ({"parameters": {"binary_data_size": 8}}, b"1234", "4 bytes follow the JSON, not 8"),
        ({"parameters": {"binary_data_size": 3}}, b"123", "3 bytes are not a multiple of 4"),
        ({"parameters": {"binary_data_size": 8}}, bytes(8), "shape [1] does not have 2 values"),
        (
            {"parameters": {"binary_data_size": 3}, "datatype": TEXT},
            b"123",
            "the length of a text is truncated",
        ),
        (
            {"parameters": {"binary_data_size": 5}, "datatype": TEXT},
            struct.pack("<I", 2) + b"a",
            "a text is truncated",
        ),
        (
            {"parameters": {"binary_data_size": 5}, "datatype": TEXT},
            struct.pack("<I", 1) + b"\xff",
            "can't decode byte 0xff",
        ),
    ],
)
def test_damage_is_an_error(fields: dict[str, Any], binary: bytes, problem: str) -> None:
    item = InputTensor.model_validate({"name": "x", "shape": [1], "datatype": "FP32", **fields})
    with pytest.raises(InvalidRequestError) as caught:
        read_tensors([item], binary)
    assert problem in str(caught.value)


def test_deeply_nested_data_are_read_or_refused() -> None:
    head = '{"name": "x", "shape": [1], "datatype": "FP32", "data": '
    deep, deeper = (f"{head}{'[' * depth}1{']' * depth}}}".encode() for depth in (100, 10_000))
    assert read_tensors([InputTensor.parse(deep, {})], b"")["x"] == [1]
    with pytest.raises(InvalidRequestError, match="recursion"):
        InputTensor.parse(deeper, {})


def test_an_input_that_occurs_twice_is_an_error() -> None:
    item = InputTensor(name="x", shape=[1], datatype="FP32", data=[1])
    with pytest.raises(InvalidRequestError, match="occurs twice"):
        read_tensors([item, item], b"")
