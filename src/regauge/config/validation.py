"""Describes pydantic validation errors in run file terms."""

from __future__ import annotations

import difflib
import json
import re
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ValidationError

from regauge.config import peer_names
from regauge.system import choices
from regauge.system.errors import SettingsError
from regauge.system.expectations import describe_expectation, format_value
from regauge.system.wording import join_alternatives

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pydantic_core import ErrorDetails

MIN_SIMILARITY = 0.85
"""Similarity at which an unknown key counts as a misspelling rather than a peer name."""
M = TypeVar("M", bound=BaseModel)


def require_pattern(pattern: str, expectation: str) -> AfterValidator:
    """Return a text validator; `expectation` describes a matching text, and a remedy.

    Unlike a pydantic field pattern, its message does not show a regular expression.
    """
    expression = re.compile(pattern)

    def check_text(text: str) -> str:
        if not expression.fullmatch(text):
            raise ValueError(f"{format_value(text)} is not {expectation}")
        return text

    return AfterValidator(check_text)


def convert_error(error: ValidationError, root: type[BaseModel], source: str) -> SettingsError:
    """Convert the most useful problem in a validation error to one line with a remedy.

    `source` is the location in front of the problem; it may be empty.
    """
    problem, remedy = _describe_error(error.errors(include_url=False), root)
    return SettingsError(f"{source}: {problem}" if source else problem, remedy)


def describe_unknown_key(
    path: str, siblings: tuple[str, ...], root: type[BaseModel]
) -> tuple[str, str]:
    """Return the problem and remedy for an unknown dotted key; `siblings` are its table's keys."""
    return f"unknown key '{path}'", suggest_key(path.rpartition(".")[2], siblings, root)


def suggest_key(word: str, siblings: tuple[str, ...], root: type[BaseModel]) -> str:
    """Return the remedy for an unknown key: the key that its author may have meant.

    `siblings` are the known keys in its table. Peer names are recognized, too.
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
    """Yield the dotted keys of a settings class and its tables, without those of choices."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        table = find_model(field.annotation, BaseModel)
        if table is not None:
            yield from list_paths(table, f"{prefix}{name}.")


def find_model(annotation: Any, base: type[M]) -> type[M] | None:
    """Return class `X` in an annotation such as `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, base):
        return annotation
    inner = (find_model(argument, base) for argument in get_args(annotation))
    return next(filter(None, inner), None)


def _describe_error(problems: list[ErrorDetails], root: type[BaseModel]) -> tuple[str, str]:
    # A misspelled required key is both missing and unknown; the unknown key helps more.
    unknown = (problem for problem in problems if problem["type"] == "extra_forbidden")
    first = next(unknown, None)
    alternatives = [first] if first else _select_alternatives(root, problems)
    first = alternatives[0]
    path = ".".join(_strip_union_tags(root, first["loc"]))
    if first["type"] == "extra_forbidden":
        return describe_unknown_key(path, _list_siblings(root, first["loc"]), root)
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        key, items = path.rpartition(".")[0], format_value(first["input"])
        return f"'{key}' has too few items, got {items}", f"add items to {key}"
    if first["type"] == "missing":
        return f"'{path}' is missing", f"set {path}"
    if first["type"] in {"value_error", "assertion_error"}:
        return _describe_check(first, path)
    value = first["input"]
    if first["type"] in {"tuple_type", "list_type"} and isinstance(value, str | int | float):
        return f"'{path}' is a list, got {format_value(value)}", f"write {path} = {_wrap(value)}"
    expected = join_alternatives(dict.fromkeys(map(describe_expectation, alternatives)))
    subject = f"'{path}'" if path else "the document"
    problem = f"{subject} must be {expected}, got {format_value(value)}"
    return problem, _suggest_value(first) or f"correct {path or 'it'}"


def _describe_check(problem: ErrorDetails, path: str) -> tuple[str, str]:
    """Return the problem and remedy of a custom settings check."""
    message = problem["msg"].partition(", ")[2]
    text, _, remedy = message.rpartition("; ")
    subject = f"'{path}': " if path else ""
    if text:
        return f"{subject}{text}", remedy
    value = problem["input"]
    got = "" if isinstance(value, dict | BaseModel) else f", got {format_value(value)}"
    return f"{subject}{message}{got}", f"correct {path or 'it'}"


def _suggest_value(problem: ErrorDetails) -> str:
    """Return the closest permitted value, or nothing."""
    value = problem["input"]
    if problem["type"] != "literal_error" or not isinstance(value, str):
        return ""
    expected = str(problem["ctx"]["expected"]).replace("' or '", "', '").strip("'").split("', '")
    for setting in peer_names.find_settings(value):
        if (name := setting.partition("=")[2]) in expected:
            return f"did you mean '{name}'?"
    remedy = choices.did_you_mean(value, expected)
    return remedy if remedy.startswith("did") else ""


def _wrap(value: Any) -> str:
    return json.dumps([value], ensure_ascii=False)


def _select_alternatives(root: type[BaseModel], problems: list[ErrorDetails]) -> list[ErrorDetails]:
    """Return the first problem; for a union, that of the closest type, or all of them."""
    key = _strip_union_tags(root, problems[0]["loc"])
    same_key = [
        item for item in problems if _strip_union_tags(root, item["loc"])[: len(key)] == key
    ]
    for problem in same_key:
        if problem["type"] != "literal_error" and not problem["type"].endswith("_type"):
            return [problem]
    return same_key


def _strip_union_tags(annotation: Any, loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return a location's keys without the union tags that pydantic inserts."""
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
