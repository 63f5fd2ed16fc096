"""Messages between the server and the worker processes: a JSON header and arrays.

A message is two lengths (unsigned 32-bit integers, little-endian), the header, and the array bytes.
The header describes each array's shape and dtype. Nothing is unpickled.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Sequence

SIZES = struct.Struct("<II")
SOCKET_BYTES = 4 << 20
"""Socket send buffer, so that a batch is sent before the last one is computed."""
ARRAYS = "arrays"
"""Header key with each array's shape and dtype."""
ARRAY_KINDS = frozenset("iufb")
"""Dtype kinds allowed in a message: integers, floats and booleans."""


class Message(NamedTuple):
    header: dict[str, Any]
    arrays: list[np.ndarray]


def encode_message(header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> bytes:
    contiguous = [np.ascontiguousarray(array) for array in arrays]
    specs = [[array.dtype.str, *array.shape] for array in contiguous]
    head = orjson.dumps({**header, ARRAYS: specs})
    body = b"".join(array.tobytes() for array in contiguous)
    return SIZES.pack(len(head), len(body)) + head + body


async def read_message(reader: asyncio.StreamReader) -> Message:
    """Read the next message; raises IncompleteReadError at the end of the stream."""
    head_size, body_size = SIZES.unpack(await reader.readexactly(SIZES.size))
    data = await reader.readexactly(head_size + body_size)
    return _decode_message(data, head_size)


def receive_message(connection: socket.socket) -> Message | None:
    """Receive the next message from a blocking socket, or None if the other end closed it."""
    sizes = _receive_exactly(connection, SIZES.size)
    if sizes is None:
        return None
    head_size, body_size = SIZES.unpack(sizes)
    data = _receive_exactly(connection, head_size + body_size)
    return None if data is None else _decode_message(data, head_size)


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return bytes(data)


def _decode_message(data: bytes, head_size: int) -> Message:
    header = orjson.loads(data[:head_size])
    arrays, offset = [], head_size
    for name, *shape in header.pop(ARRAYS):
        dtype = np.dtype(name)
        if dtype.kind not in ARRAY_KINDS:
            raise ValueError(f"a message has an array of type {dtype}")
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(data, dtype, count, offset).reshape(shape))
        offset += count * dtype.itemsize
    return Message(header, arrays)
