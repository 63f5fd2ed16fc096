"""Open Inference Protocol tensors: as JSON, and as bytes after the JSON.

The bytes follow the binary tensor data extension: numbers are little-endian, and each text is a
length (unsigned 32-bit integer, little-endian) and UTF-8 bytes.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
from pydantic import Field

from regauge.serving.request_body import RequestBody
from regauge.serving.request_errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TEXT = "BYTES"
DTYPES = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
"""Data type -> numpy dtype; without texts."""
SIZE = struct.Struct("<I")
NUMBER_KINDS = "biuf"
MAX_DIMENSIONS = 8


class TensorParameters(RequestBody):
    """Input parameters."""

    binary_data_size: int | None = Field(default=None, ge=0)
    """Bytes of the values after the JSON."""
    shared_memory_region: str | None = None
    """Shared memory region, which is refused."""


class InputTensor(RequestBody):
    """A request input."""

    name: str
    """Input name, as in the model's metadata."""
    shape: list[int] = Field(max_length=MAX_DIMENSIONS)
    """Dimensions; the first one is the number of records."""
    datatype: str
    """Data type: `BYTES` for texts, `FP32` and the like for numbers."""
    parameters: TensorParameters = TensorParameters()
    """How the values are sent."""
    data: list[Any] | None = None
    """The values, flat or nested, unless they follow the JSON as bytes."""


class OutputTensor(NamedTuple):
    """A model output."""

    name: str
    datatype: str
    values: np.ndarray
    """[records, …]; texts are strings in an object array."""


def read_tensors(inputs: Sequence[InputTensor], binary: bytes) -> dict[str, np.ndarray]:
    """Return inputs by name; `binary` holds the bytes after the JSON.

    Texts are strings in an object array. Raises InvalidRequestError for an invalid input.
    """
    tensors: dict[str, np.ndarray] = {}
    offset = 0
    for item in inputs:
        if item.name in tensors:
            raise InvalidRequestError(f"input '{item.name[:80]}' occurs twice")
        size = item.parameters.binary_data_size
        try:
            if size is None:
                tensors[item.name] = _read_json(item)
            else:
                tensors[item.name] = _read_binary(item, binary[offset : offset + size], size)
                offset += size
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidRequestError(f"input '{item.name[:80]}': {error}") from None
    if offset != len(binary):
        raise InvalidRequestError(f"{len(binary)} bytes follow the JSON, not {offset}")
    return tensors


def encode_outputs(
    document: dict[str, Any], outputs: Sequence[tuple[OutputTensor, bool]]
) -> tuple[bytes, int | None]:
    """Return an answer with outputs, and the JSON length if bytes follow.

    An output with True is sent as bytes.
    """
    chunks: list[bytes] = []
    items = []
    for output, is_binary in outputs:
        item: dict[str, Any] = {
            "name": output.name,
            "datatype": output.datatype,
            "shape": list(output.values.shape),
        }
        if is_binary:
            chunk = _to_bytes(output)
            chunks.append(chunk)
            item["parameters"] = {"binary_data_size": len(chunk)}
        elif output.datatype == TEXT:
            item["data"] = output.values.tolist()
        else:
            item["data"] = np.ascontiguousarray(output.values).reshape(-1)
        items.append(item)
    option = orjson.OPT_SERIALIZE_NUMPY
    head = orjson.dumps({**document, "outputs": items}, option=option)
    return b"".join([head, *chunks]), len(head) if chunks else None


def _read_json(item: InputTensor) -> np.ndarray:
    """Return an input's values; raises ValueError, TypeError or OverflowError."""
    if item.data is None:
        raise ValueError("data is missing")
    flat = list(_flatten(item.data))
    _check_count(item.shape, len(flat))
    if item.datatype == TEXT:
        if not all(isinstance(value, str) for value in flat):
            raise ValueError("data contains a value that is not a text")
        return _to_texts(flat, item.shape)
    dtype = _find_dtype(item.datatype)
    if dtype.kind == "f":
        flat = [math.nan if value is None else value for value in flat]
    array = np.asarray(flat)
    if array.size and array.dtype.kind not in NUMBER_KINDS:
        raise ValueError("data contains a value that is not a number of its data type")
    with np.errstate(over="ignore", invalid="ignore"):
        values = array.astype(dtype)
    if dtype.kind != "f" and not np.array_equal(values, array):
        raise ValueError(f"data contains a value that is not of data type {item.datatype}")
    return values.reshape(item.shape)


def _read_binary(item: InputTensor, data: bytes, size: int) -> np.ndarray:
    """Return an input's values after the JSON; raises ValueError."""
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes follow the JSON, not {size}")
    if item.datatype != TEXT:
        dtype = _find_dtype(item.datatype)
        if size % dtype.itemsize:
            raise ValueError(f"{size} bytes are not a multiple of {dtype.itemsize}")
        values = np.frombuffer(data, dtype)
        _check_count(item.shape, len(values))
        return values.reshape(item.shape)
    texts, offset = [], 0
    while offset < size:
        if offset + SIZE.size > size:
            raise ValueError("the length of a text is truncated")
        [length] = SIZE.unpack_from(data, offset)
        offset += SIZE.size
        if offset + length > size:
            raise ValueError("a text is truncated")
        texts.append(data[offset : offset + length].decode())
        offset += length
    _check_count(item.shape, len(texts))
    return _to_texts(texts, item.shape)


def _find_dtype(datatype: str) -> np.dtype[Any]:
    if datatype not in DTYPES:
        raise ValueError(f"data type '{datatype[:20]}' is unknown")
    return np.dtype(DTYPES[datatype])


def _check_count(shape: Sequence[int], count: int) -> None:
    if any(size < 0 for size in shape) or math.prod(shape) != count:
        raise ValueError(f"shape {list(shape)} does not have {count} values")


def _flatten(data: Sequence[Any]) -> Iterator[Any]:
    for value in data:
        if isinstance(value, list):
            yield from _flatten(value)
        else:
            yield value


def _to_texts(texts: list[str], shape: Sequence[int]) -> np.ndarray:
    array = np.empty(len(texts), object)
    array[:] = texts
    return array.reshape(shape)


def _to_bytes(output: OutputTensor) -> bytes:
    if output.datatype != TEXT:
        return output.values.astype(DTYPES[output.datatype], copy=False).tobytes()
    encoded = [str(text).encode() for text in output.values.reshape(-1)]
    return b"".join(SIZE.pack(len(text)) + text for text in encoded)
