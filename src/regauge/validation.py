"""Describes validation errors of pydantic in the words of run files."""

from __future__ import annotations

import difflib
import json
import re
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ValidationError

from regauge import choices, peer_names
from regauge.errors import SettingsError
from regauge.wording import format_count, join_alternatives

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pydantic_core import ErrorDetails

MIN_SIMILARITY = 0.85
"""Similarity from which an unknown key is a misspelled key of its table, not a peer's name."""
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
"""What a value must be, by pydantic's type of the error."""
_SIZES = {"too_short": ("at least", "min_length"), "too_long": ("at most", "max_length")}
M = TypeVar("M", bound=BaseModel)
MAX_VALUE_LENGTH = 80
"""Characters of a wrong value that a message shows."""


def require_pattern(pattern: str, expectation: str) -> AfterValidator:
    """Return a validator of texts: `expectation` is the name of a text that matches, and a remedy.

    Unlike the pattern of a pydantic field, it gives a message without a regular expression.
    """
    expression = re.compile(pattern)

    def check_text(text: str) -> str:
        if not expression.fullmatch(text):
            raise ValueError(f"{format_value(text)} is not {expectation}")
        return text

    return AfterValidator(check_text)


def convert_error(error: ValidationError, root: type[BaseModel], source: str) -> SettingsError:
    """Convert the most useful problem of a validation error to one line with a remedy.

    `source` is the location in front of the problem; it may be empty.
    """
    problem, remedy = _describe_error(error.errors(include_url=False), root)
    return SettingsError(f"{source}: {problem}" if source else problem, remedy)


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


def suggest_key(word: str, siblings: tuple[str, ...], root: type[BaseModel]) -> str:
    """Return the remedy for an unknown key: the key that its author may have meant.

    `siblings` are the known keys of its table. Names of other systems are known, too.
    """
    remedy = choices.did_you_mean(word, siblings)
    if difflib.get_close_matches(word, siblings, 1, MIN_SIMILARITY):
        return remedy
    settings = peer_names.find_settings(word)
    names = [setting.partition("=")[0].rpartition(".")[2] for setting in settings]
    if sibling := next((name for name in names if name in siblings), None):
        return _ask([sibling])
    if settings:
        return _ask(settings)
    if reason := peer_names.find_absence(word):
        return f"remove it, because {reason}"
    if remedy.startswith("known"):
        paths = [path for path in list_paths(root) if path.rpartition(".")[2] == word]
        return _ask(paths) if paths else remedy
    return remedy


def _ask(names: Iterable[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return f"did you mean {join_alternatives(quoted)}?"


def list_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a settings class and of the tables in it; no keys of choices."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        table = find_model(field.annotation, BaseModel)
        if table is not None:
            yield from list_paths(table, f"{prefix}{name}.")


def find_model(annotation: Any, base: type[M]) -> type[M] | None:
    """Return the class `X` of an annotation such as `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, base):
        return annotation
    inner = (find_model(argument, base) for argument in get_args(annotation))
    return next(filter(None, inner), None)


def _describe_error(problems: list[ErrorDetails], root: type[BaseModel]) -> tuple[str, str]:
    """Return the problem and the remedy of pydantic's most useful problem."""
    # A misspelled required key is both missing and unknown; the unknown key helps more.
    unknown = (problem for problem in problems if problem["type"] == "extra_forbidden")
    first = next(unknown, None)
    alternatives = [first] if first else _select_alternatives(root, problems)
    first = alternatives[0]
    path = ".".join(_strip_union_tags(root, first["loc"]))
    if first["type"] == "extra_forbidden":
        word = str(first["loc"][-1])
        return f"unknown key '{path}'", suggest_key(word, _list_siblings(root, first["loc"]), root)
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        key, items = path.rpartition(".")[0], format_value(first["input"])
        return f"'{key}' has too few items, got {items}", f"add items to {key}"
    if first["type"] == "missing":
        return f"'{path}' is missing", f"set {path}"
    if first["type"] in {"value_error", "assertion_error"}:
        return _describe_check(first, path)
    value = first["input"]
    if first["type"] == "tuple_type" and isinstance(value, str | int | float):
        return f"'{path}' is a list, got {format_value(value)}", f"write {path} = {_wrap(value)}"
    expected = join_alternatives(dict.fromkeys(map(describe_expectation, alternatives)))
    subject = f"'{path}'" if path else "the document"
    problem = f"{subject} must be {expected}, got {format_value(value)}"
    return problem, _suggest_value(first) or f"correct {path or 'it'}"


def _describe_check(problem: ErrorDetails, path: str) -> tuple[str, str]:
    """Return the problem and the remedy of a check of a settings class."""
    message = problem["msg"].partition(", ")[2]
    text, _, remedy = message.rpartition("; ")
    subject = f"'{path}': " if path else ""
    if text:
        return f"{subject}{text}", remedy
    value = problem["input"]
    got = "" if isinstance(value, dict | BaseModel) else f", got {format_value(value)}"
    return f"{subject}{message}{got}", f"correct {path or 'it'}"


def _suggest_value(problem: ErrorDetails) -> str:
    """Return the closest permitted value of a key with a list of values, or nothing."""
    value = problem["input"]
    if problem["type"] != "literal_error" or not isinstance(value, str):
        return ""
    expected = str(problem["ctx"]["expected"]).replace("' or '", "', '").strip("'").split("', '")
    for setting in peer_names.find_settings(value):
        if (name := setting.partition("=")[2]) in expected:
            return f"did you mean '{name}'?"
    remedy = choices.did_you_mean(value, expected)
    return remedy if remedy.startswith("did") else ""


def format_value(value: Any) -> str:
    """Return a wrong value as a message shows it: tables by their kind, long values shortened."""
    if isinstance(value, dict | BaseModel):
        return "a table"
    text = {None: "nothing", True: "true", False: "false"}.get(value) if _is_word(value) else None
    if isinstance(value, tuple | list):
        text = f"[{', '.join(map(format_value, value))}]"
    text = text or repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[: MAX_VALUE_LENGTH - 1]}…"


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _wrap(value: Any) -> str:
    return json.dumps([value], ensure_ascii=False)


def _select_alternatives(root: type[BaseModel], problems: list[ErrorDetails]) -> list[ErrorDetails]:
    """Return the first problem; for a union, the problem of the closest type or all of them."""
    key = _strip_union_tags(root, problems[0]["loc"])
    same_key = [
        item for item in problems if _strip_union_tags(root, item["loc"])[: len(key)] == key
    ]
    for problem in same_key:
        if problem["type"] != "literal_error" and not problem["type"].endswith("_type"):
            return [problem]
    return same_key


def _strip_union_tags(annotation: Any, loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the keys of a location, without the union members that pydantic inserts."""
    if not loc or loc == ("[key]",):
        return ()
    inner = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _strip_union_tags(inner[0], loc)
    if get_origin(annotation) in (Union, UnionType):
        types = [member for member in inner if member is not NoneType]
        return min((_strip_union_tags(member, loc[len(types) > 1 :]) for member in types), key=len)
    item = inner[-2 if ... in inner else -1] if inner else None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(loc[0]))
        item = field.annotation if field else None
    return (*([str(loc[0])] if loc[0] != "" else []), *_strip_union_tags(item, loc[1:]))


def _list_siblings(root: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the known keys of the table that contains an unknown key."""
    model = root
    for part in loc[:-1]:
        if isinstance(part, str) and part in model.model_fields:
            model = find_model(model.model_fields[part].annotation, BaseModel) or model
    return tuple(model.model_fields)
