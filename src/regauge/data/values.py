"""Record values: one conversion from every input format, their kinds and keys.

A value is kept exactly, or refused with a reason; it is never replaced by another one. NaN and null
are missing values.
"""

from __future__ import annotations

import json
import math
from datetime import date, time, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, TypeGuard

Value = str | int | float | bool | list[Any] | dict[str, Any]
"""A text, number, truth value, or nested value as in JSON. An integer has any size."""
FieldKind = Literal["text", "integer", "uint64", "float", "boolean", "date", "decimal", "json"]
"""Kind of a field's values, which decides the column type.

"date" has dates and times as ISO 8601 texts, "decimal" has exact numbers as texts, and "json" has
any values as JSON texts.
"""
INT64 = range(-(2**63), 2**63)
UINT64 = range(2**64)
MAX_DIGITS = 1000
"""Maximum digits in an integer written as text."""
TEXT_KINDS = ("text", "date", "decimal")
"""Kinds stored as texts without quotes."""
NUMBER_KINDS = {"integer", "uint64", "decimal", "float"}
_KEY_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True)


def convert_value(value: object) -> Value | None:
    """Convert a value in any input format to a record value; None if it is missing.

    Raises ValueError with the reason if a value cannot be kept exactly.
    """
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Decimal):
        return _convert_decimal(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return str(value)
    if isinstance(value, list | dict):
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"a nested value that is not JSON ({error})") from None
        return value
    raise ValueError(f"a value of type {type(value).__name__}")


def _convert_decimal(number: Decimal) -> Value | None:
    """Return a decimal number as an integer or a float if exact, else as text."""
    if not number.is_finite():
        return None if number.is_nan() else float(number)
    if number == number.to_integral_value():
        return int(number)
    return float(number) if Decimal(repr(float(number))) == number else str(number)


def infer_kind(value: Value) -> FieldKind:
    """Return the narrowest kind for an exact value."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer" if value in INT64 else "uint64" if value in UINT64 else "decimal"
    return "float" if isinstance(value, float) else "json"


def merge_kinds(kind: FieldKind, other: FieldKind, *, has_negative: bool) -> FieldKind:
    """Return the kind for a field with values of two kinds.

    Two kinds of numbers become the one that keeps both; `has_negative` is whether a number is below
    zero. Otherwise the first kind stays, and records with another value are rejected.
    """
    kinds = {kind, other}
    if len(kinds) == 1 or not kinds <= NUMBER_KINDS:
        return kind
    if kinds == {"integer", "float"}:
        return "float"
    return "uint64" if kinds == {"integer", "uint64"} and not has_negative else "decimal"


def fits_kind(value: Value, kind: FieldKind) -> bool:
    """Return whether a column of this kind keeps a value exactly."""
    if kind in {"json", "boolean"} or isinstance(value, bool):
        return kind == "json" or (kind == "boolean" and isinstance(value, bool))
    if isinstance(value, str):
        return kind in TEXT_KINDS
    if isinstance(value, list | dict):
        return False
    if kind == "decimal":
        return True
    if kind == "float":
        return isinstance(value, float) or _equals_float(value)
    limits = {"integer": INT64, "uint64": UINT64}.get(kind)
    return limits is not None and (number := read_integer(value)) is not None and number in limits


def to_cell(value: Value | None, kind: FieldKind) -> Value | None:
    """Return a value as a cell in a column of a fitting kind."""
    if value is None or kind in {"text", "boolean", "date"}:
        return value
    if kind == "json":
        return json.dumps(value, ensure_ascii=False)
    if kind == "decimal":
        return format_key(value)
    return float(value) if kind == "float" else read_integer(value)  # type: ignore[arg-type]


def read_integer(value: object) -> int | None:
    """Return an integer, a whole float or a truth value as an integer; None for any other value."""
    if isinstance(value, int):
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else None


def parse_integer(text: str) -> int:
    """Parse an integer of any size; whole decimal numbers such as "7.0" are integers.

    Raises ValueError for other texts.
    """
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise ValueError from None
    is_number = "_" not in text and number.is_finite() and number.adjusted() < MAX_DIGITS
    if not is_number or number != number.to_integral_value():
        raise ValueError
    return int(number)


def parse_float(text: str) -> float:
    """Parse a finite number; raises ValueError for other texts."""
    number = float(text)
    if not math.isfinite(number) or "_" in text:
        raise ValueError
    return number


def format_key(value: Value) -> str:
    """Return a text to identify a value as a group or a category.

    Equal values have equal keys: 7, 7.0 and "7", or 1 and true.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list | dict):
        return _KEY_ENCODER.encode(value)
    return str(value if (number := read_integer(value)) is None else number)


def _equals_float(number: int) -> bool:
    """Return whether a float has exactly an integer's value."""
    try:
        return int(float(number)) == number
    except OverflowError:
        return False


def is_word_list(value: Any) -> TypeGuard[list[str]]:
    """Return whether a value is a list of words, as sentences with a tag per word have them."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(word, str) and word.strip() for word in value)
    )
