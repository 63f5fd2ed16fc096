"""What sources yield, for tests."""

from __future__ import annotations

from regauge.data.sources import Record, Rejected, Source, Value


def everything(source: Source) -> list[Record | Rejected]:
    return [found for piece in source.pieces() for found in source.read(piece)]


def texts(source: Source) -> list[Value]:
    return [found.fields["text"] for found in everything(source) if isinstance(found, Record)]


def rejected(source: Source) -> list[tuple[str, str]]:
    found = everything(source)
    return [(item.place, item.reason) for item in found if isinstance(item, Rejected)]


def fields(source: Source) -> list[dict[str, Value]]:
    return [found.fields for found in everything(source) if isinstance(found, Record)]
