"""Converts documents, such as JSON objects and rows of tables, to records."""

from __future__ import annotations

import json
import math

from regauge.data.sources import UNDECODABLE, Record, Rejected
from regauge.data.values import Value, convert_value


def parse_record(
    file: str, location: str, data: bytes, columns: tuple[str, ...]
) -> Record | Rejected:
    """Return the record of a JSON object, or why it cannot be used."""
    try:
        document = json.loads(data.decode())
    except UnicodeDecodeError as error:
        return Rejected(file, location, UNDECODABLE, str(error))
    except (ValueError, RecursionError) as error:
        return Rejected(file, location, "malformed JSON", str(error))
    if not isinstance(document, dict):
        return Rejected(file, location, "not a JSON object", type(document).__name__)
    for name, value in document.items():
        # A number that is too large for a float is read as infinity.
        if isinstance(value, float) and math.isinf(value) and (name in columns or not columns):
            return Rejected(file, location, "a number out of range", f"'{name}'")
    return build_record(file, location, document, columns)


def build_record(
    file: str, location: str, document: dict[str, object], columns: tuple[str, ...]
) -> Record | Rejected:
    """Return the record of a document with the given columns, or with all.

    A record with a value that cannot be kept exactly is rejected.
    """
    fields: dict[str, Value] = {}
    for name in columns or document:
        try:
            value = convert_value(document.get(name))
        except ValueError as error:
            return Rejected(file, location, "a value that cannot be kept", f"'{name}': {error}")
        if value is not None:
            fields[name] = value
    return Record(file, location, fields)
