"""Messages between the server and its workers: they arrive as sent, in any pieces."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import threading
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.serving.wire import ARRAYS, Message, encode_message, read_message, receive_message

DTYPES = st.sampled_from(["<i4", "<i8", "<f4", "<f8", "|u1", "|b1"])
SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=3)
ARRAY_LISTS = st.lists(st.tuples(DTYPES, SHAPES, st.integers(0, 1 << 30)), max_size=4)
VALUES = st.one_of(st.integers(-(2**53), 2**53), st.text(max_size=20), st.booleans(), st.none())
HEADERS = st.dictionaries(st.text(max_size=8).filter(lambda key: key != ARRAYS), VALUES, max_size=5)


def build_arrays(specs: list[tuple[str, list[int], int]]) -> list[np.ndarray]:
    arrays = []
    for dtype, shape, seed in specs:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        data = np.random.default_rng(seed).bytes(size)
        data = bytes(byte & 1 for byte in data) if dtype == "|b1" else data
        arrays.append(np.frombuffer(data, dtype).reshape(shape))
    return arrays


def check_equal(message: Message | None, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
    assert message is not None
    assert message.header == header
    assert len(message.arrays) == len(arrays)
    for actual, expected in zip(message.arrays, arrays, strict=True):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tobytes() == expected.tobytes()


@given(HEADERS, ARRAY_LISTS, st.integers(1, 64))
def test_a_message_arrives_as_it_was_sent(
    header: dict[str, Any], specs: list[tuple[str, list[int], int]], piece: int
) -> None:
    """Both readers get two messages, in pieces of any size."""
    arrays = build_arrays(specs)
    data = encode_message(header, arrays) + encode_message({"last": True})

    async def read() -> None:
        reader = asyncio.StreamReader()
        for start in range(0, len(data), piece):
            reader.feed_data(data[start : start + piece])
        reader.feed_eof()
        check_equal(await read_message(reader), header, arrays)
        check_equal(await read_message(reader), {"last": True}, [])
        with pytest.raises(asyncio.IncompleteReadError):
            await read_message(reader)

    asyncio.run(read())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.close()
        check_equal(receive_message(theirs), header, arrays)
        check_equal(receive_message(theirs), {"last": True}, [])
        assert receive_message(theirs) is None


def test_a_large_message_arrives_through_a_small_buffer() -> None:
    arrays = [np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000).T]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=ours.sendall, args=(encode_message({}, arrays),))
        sender.start()
        check_equal(receive_message(theirs), {}, [np.ascontiguousarray(arrays[0])])
        sender.join()


@pytest.mark.parametrize("cut", [1, 7, 8, 12, -1])
def test_a_cut_message_is_the_end_of_the_stream(cut: int) -> None:
    data = encode_message({"id": 1}, [np.zeros(4)])[:cut]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.close()
        assert receive_message(theirs) is None


@pytest.mark.parametrize("dtype", ["|O", "<U4", "|V8", "<M8[s]"])
def test_objects_are_refused(dtype: str) -> None:
    """Nothing is unpickled, whatever the other end sends."""
    body = pickle.dumps(print)
    head = orjson.dumps({ARRAYS: [[dtype, 1]]})
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(struct.pack("<II", len(head), len(body)) + head + body)
        with pytest.raises(ValueError, match="array of type"):
            receive_message(theirs)
