"""Converts documents to records: selects the texts and numbers of given columns or of all."""

from __future__ import annotations

import json
import math

from regauge.data.sources import Record, Rejected, Value

INTEGERS = range(-(2**63), 2**63)
"""The integers that fit into 64 bits."""


def parse_record(
    file: str, location: str, data: bytes, columns: tuple[str, ...]
) -> Record | Rejected:
    """Return the record of a JSON object, or why it cannot be used."""
    try:
        document = json.loads(data.decode())
    except UnicodeDecodeError as error:
        return Rejected(file, location, "undecodable bytes", str(error))
    except (ValueError, RecursionError) as error:
        return Rejected(file, location, "malformed JSON", str(error))
    if not isinstance(document, dict):
        return Rejected(file, location, "not a JSON object", type(document).__name__)
    return Record(file, location, select_values(document, columns))


def select_values(document: dict[str, object], columns: tuple[str, ...]) -> dict[str, Value]:
    """Return the texts and numbers of a document, of the given columns or of all.

    Integers have 64 bits and real numbers are finite; any other value counts as missing. A list in
    a named column, such as the messages of a conversation, is returned as JSON.
    """
    raw = {name: _encode_list(document.get(name)) for name in columns} if columns else document
    converted = {name: _convert_value(value) for name, value in raw.items()}
    return {name: value for name, value in converted.items() if value is not None}


def _encode_list(value: object) -> object:
    """Return a list as JSON, and any other value unchanged."""
    try:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
    except (TypeError, ValueError):
        return None


def _convert_value(value: object) -> Value | None:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return int(value) if isinstance(value, int) and value in INTEGERS else None
