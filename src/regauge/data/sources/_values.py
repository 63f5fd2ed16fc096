"""What of a document is a value of a record: texts and numbers, of these columns or of all."""

from __future__ import annotations

import json
import math

from regauge.data.sources import Record, Rejected, Value

INTEGERS = range(-(2**63), 2**63)


def parsed(file: str, place: str, data: bytes, columns: tuple[str, ...]) -> Record | Rejected:
    """Return the record of a JSON object."""
    try:
        document = json.loads(data.decode())
    except UnicodeDecodeError as error:
        return Rejected(file, place, "undecodable bytes", str(error))
    except (ValueError, RecursionError) as error:
        return Rejected(file, place, "malformed JSON", str(error))
    if not isinstance(document, dict):
        return Rejected(file, place, "no JSON object", type(document).__name__)
    return Record(file, place, usable(document, columns))


def usable(document: dict[str, object], columns: tuple[str, ...]) -> dict[str, Value]:
    """Return the texts and numbers of a document, of these columns or of all.

    An integer has 64 bits and a real number is finite; any other value is missing. A list that is
    asked for by its name, such as the messages of a conversation, comes as JSON.
    """
    found = {name: _as_text(document.get(name)) for name in columns} if columns else document
    return {name: value for name, given in found.items() if (value := _usable(given)) is not None}


def _as_text(value: object) -> object:
    """Return a list as JSON, and anything else as it is."""
    try:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
    except (TypeError, ValueError):
        return None


def _usable(value: object) -> Value | None:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return int(value) if isinstance(value, int) and value in INTEGERS else None
