"""Says what a value must be, and what it is, in the words of run files and JSON documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from regauge.system.wording import format_count

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

EXPECTATIONS = {
    "bool_type": "true or false",
    "date_from_datetime_inexact": "a date such as 2026-01-31",
    "date_from_datetime_parsing": "a date such as 2026-01-31",
    "date_parsing": "a date such as 2026-01-31",
    "date_type": "a date such as 2026-01-31",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "invalid_key": "a table whose keys are texts",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "model_type": "a table",
    "multiple_of": "a multiple of {multiple_of}",
    "none_required": "left out",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "string_too_long": "a text of at most {max_length} characters",
    "string_too_short": "a text of at least {min_length} characters",
    "string_type": "a text",
    "string_unicode": "valid Unicode text",
    "tuple_type": "a list",
}
"""pydantic error type -> what the value must be."""
_SIZES = {"too_short": ("at least", "min_length"), "too_long": ("at most", "max_length")}
MAX_VALUE_LENGTH = 80
"""How many characters of a wrong value a message shows."""


def describe_expectation(problem: ErrorDetails) -> str:
    """Return what the value of an invalid key must be, such as `at least 1`."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "literal_error":
        # pydantic lists the values as 'a', 'b' or 'c'.
        return str(context["expected"])
    if kind in _SIZES:
        limit, name = _SIZES[kind]
        noun = "key" if isinstance(problem["input"], dict) else "item"
        container = "table" if noun == "key" else "list"
        return f"a {container} of {limit} {format_count(context[name], noun)}"
    if kind in EXPECTATIONS:
        return EXPECTATIONS[kind].format(**context)
    if kind == "missing":
        return "set"
    return problem["msg"].partition(", ")[2] or problem["msg"]


def format_value(value: Any) -> str:
    """Return a wrong value as a message shows it: tables by their kind, long values shortened."""
    if isinstance(value, dict | BaseModel):
        return "a table"
    text = {"None": "nothing", "True": "true", "False": "false"}.get(repr(value))
    if isinstance(value, tuple | list):
        text = f"[{', '.join(map(format_value, value))}]"
    text = text or repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[: MAX_VALUE_LENGTH - 1]}…"
