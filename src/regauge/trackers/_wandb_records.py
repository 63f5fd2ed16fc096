"""Reads which values the records of W&B in a folder have.

A file of W&B is a log of LevelDB: after a header, blocks with records of checksum, length and type.
A killed process may leave an incomplete last record, which is skipped.
"""

from __future__ import annotations

import json
import struct
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE_HEADER_BYTES, BLOCK_BYTES = 7, 32768
RECORD_HEADER = struct.Struct("<IHB")
FULL, FIRST, LAST = 1, 2, 4
STEP = "step"


def read_recorded(folder: Path) -> set[tuple[str, int]]:
    """Return the names and steps of all metrics in the records of a folder."""
    recorded = set()
    for path in sorted(folder.glob("*run-*/run-*.wandb")):
        for row in _read_rows(path.read_bytes()):
            if isinstance(step := row.get(STEP), int):
                recorded |= {(name, step) for name in row if name != STEP}
    return recorded


def _read_rows(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the rows of metrics."""
    # Neither module has types.
    decode_error: type[Exception] = import_module("google.protobuf.message").DecodeError
    record_type: Any = import_module("wandb.proto.wandb_internal_pb2").Record
    for content in _read_records(data):
        try:
            record = record_type.FromString(content)
        except decode_error:
            continue
        if record.HasField("history"):
            yield {
                item.key or ".".join(item.nested_key): _parse_value(item.value_json)
                for item in record.history.item
            }


def _read_records(data: bytes) -> Iterator[bytes]:
    """Yield the whole records of a file."""
    offset, parts = FILE_HEADER_BYTES, b""
    while offset + RECORD_HEADER.size <= len(data):
        block_left = BLOCK_BYTES - offset % BLOCK_BYTES
        if block_left < RECORD_HEADER.size:
            offset += block_left
            continue
        _, length, kind = RECORD_HEADER.unpack_from(data, offset)
        offset += RECORD_HEADER.size
        content = data[offset : offset + length]
        if len(content) < length:
            return
        offset += length
        parts = content if kind in {FULL, FIRST} else parts + content
        if kind in {FULL, LAST}:
            yield parts


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
