"""Reads everything that a source yields, for tests."""

from __future__ import annotations

from regauge.data.sources import Record, Rejected, Source
from regauge.data.values import Value


def read_items(source: Source) -> list[Record | Rejected]:
    """Return all records and rejections, in order."""
    return [item for piece in source.list_pieces() for item in source.read(piece)]


def read_texts(source: Source) -> list[Value]:
    """Return the field `text` of all records."""
    return [fields["text"] for fields in read_fields(source)]


def list_rejected(source: Source) -> list[tuple[str, str]]:
    """Return the location and the reason of all rejections."""
    items = read_items(source)
    return [(item.location, item.reason) for item in items if isinstance(item, Rejected)]


def read_fields(source: Source) -> list[dict[str, Value]]:
    """Return the fields of all records."""
    return [item.fields for item in read_items(source) if isinstance(item, Record)]
