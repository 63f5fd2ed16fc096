"""Strict text in, frozen settings out.

A run file is TOML. Every verb has one settings root; a run file may hold the tables of several
verbs, and each verb reads its own, but every name in the file is checked. This module knows no
verb and no choice: roots and folders are handed to it.
"""

from __future__ import annotations

import copy
import json
import tomllib
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from regauge import choices, files
from regauge.errors import SettingsError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

FORMAT = 1
"""The version of every JSON document that Regauge writes; a reader refuses a later one."""

FACTS = "run"
"""The table of a saved `run.json` that is no setting: who the run is."""

Tables = dict[str, Any]


class Settings(BaseModel):
    """A frozen table of settings; a field's docstring is its help."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True
    )


class Choice(Settings):
    """Settings whose class is chosen by `kind`, which is the name of the file that defines it."""

    kind: ClassVar[str]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        stem = cls.__module__.rsplit(".", maxsplit=1)[-1]
        if not stem.startswith("_") and "kind" not in vars(cls):
            cls.kind = stem.rstrip("_").replace("_", "-")

    @model_serializer(mode="wrap")
    def _with_kind(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"kind": type(self).kind, **handler(self)}


def chosen(folder: str) -> BeforeValidator:
    """Mark a field that a choice of a folder fills.

    The field reads `task: Annotated[SerializeAsAny[Task], chosen("tasks")]`.
    """
    return BeforeValidator(partial(choose, folder))


def choose(folder: str, value: Any) -> Any:
    """Turn a table with a `kind`, or a bare name, into the settings of that choice."""
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, dict):
        return value
    kind = value.get("kind")
    if not isinstance(kind, str):
        told = f"the kind of '{folder}' is a name, got {kind!r}"
        problem = told if "kind" in value else f"a choice of '{folder}' has no kind"
        raise SettingsError(problem, f"set kind to one of: {', '.join(choices.names(folder))}")
    choice = choices.load(folder, kind)
    rest = {key: item for key, item in value.items() if key != "kind"}
    try:
        return choice.model_validate(rest)
    except ValidationError as error:
        raise _first_problem(error, choice, f"{folder} '{kind}'") from None


S = TypeVar("S", bound=Settings)


def read(path: Path | str) -> Tables:
    """Read a run file (TOML), or the `run.json` that an earlier run saved, as nested tables."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise SettingsError(
            f"no run file {path}", "name an existing one, or write one with 'regauge init'"
        ) from None
    except IsADirectoryError:
        raise SettingsError(f"{path} is a folder", "name a run file (.toml or run.json)") from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}", "correct it there") from None
    if not isinstance(tables, dict):
        raise SettingsError(f"{path} holds no tables", "name a run file (.toml or run.json)")
    return {name: _tuples(table) for name, table in tables.items() if name != FACTS}


def override(tables: Tables, assignments: tuple[str, ...]) -> Tables:
    """Return the tables with `key.path=value` assignments applied; a value is TOML, else text."""
    result = copy.deepcopy(tables)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise SettingsError(f"'{assignment}' is no assignment", "write key.path=value")
        place: Any = result
        *parents, last = key.strip().split(".")
        for parent in parents:
            place = _inside(place, parent)
            if not isinstance(place, dict | tuple):
                raise SettingsError(f"'{parent}' in '{key}' is no table", "assign to a table's key")
        if isinstance(place, tuple):
            found = [each for each in place if isinstance(each, dict)]
            names = [str(each["name"]) for each in found if "name" in each]
            remedy = f"name one of them: {', '.join(names)}" if names else "write the whole list"
            raise SettingsError(f"'{parents[-1]}' in '{key}' is a list", remedy)
        place[last] = _value(text.strip())
    return {name: _tuples(table) for name, table in result.items()}


def _inside(place: Any, name: str) -> Any:
    """Return a table in a table, made where there is none, or in a list of them by its name."""
    if isinstance(place, dict):
        return place.setdefault(name, {})
    return next((each for each in place if isinstance(each, dict) and each.get("name") == name), 0)


def merge(below: Tables, above: Tables) -> Tables:
    """Return `below` with every leaf of `above` laid over it; a table of another kind replaces."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            same = "kind" not in value or value["kind"] == old.get("kind")
            result[key] = merge(old, value) if same else value
        else:
            result[key] = value
    return result


def build(root: type[S], tables: Tables, known: tuple[str, ...] = (), where: str = "") -> S:
    """Return the settings of a verb out of a run file's tables.

    `known` names the tables of the other verbs, which are passed over; any other name is refused.
    Raises SettingsError in one line with the nearest name.
    """
    fields = tuple(root.model_fields)
    for name in tables:
        if name not in fields and name not in known:
            remedy = choices.did_you_mean(name, tuple({*fields, *known}))
            raise SettingsError(f"{_prefix(where)}unknown key '{name}'", remedy)
    own = {name: value for name, value in tables.items() if name in fields}
    try:
        return root.model_validate(_tuples(own))
    except SettingsError as error:
        raise (error.within(where) if where else error) from None
    except ValidationError as error:
        raise _first_problem(error, root, where) from None


def dump(settings: Settings) -> Tables:
    """Return settings as JSON-ready tables; `build` of the same root takes them back."""
    return settings.model_dump(mode="json", exclude_none=True)


def flat(tree: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of nested tables by their dotted keys; a list is a leaf."""
    leaves: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{path}.{name}" if path else name
        leaves += flat(value, key) if isinstance(value, dict) and value else [(key, value)]
    return leaves


def save(path: Path, document: Tables) -> None:
    """Write a JSON document with its format version; a reader sees all of it or none."""
    text = json.dumps({"format": FORMAT, **document}, indent=2, sort_keys=True, default=str)
    files.write_atomic(path, text + "\n")


def _prefix(where: str) -> str:
    return f"{where}: " if where else ""


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in value)
    return value


def _first_problem(error: ValidationError, root: type[Settings], where: str) -> SettingsError:
    problems = error.errors(include_url=False)
    # A misspelt key that is required is both missing and unknown: what was written says more.
    unknown = (problem for problem in problems if problem["type"] == "extra_forbidden")
    first = next(unknown, None) or _of_union(root, problems)
    path = ".".join(_key(root, first["loc"])) or error.title
    if first["type"] == "extra_forbidden":
        word = str(first["loc"][-1])
        remedy = choices.did_you_mean(word, _siblings(root, first["loc"]))
        return SettingsError(f"{_prefix(where)}unknown key '{path}'", remedy)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return SettingsError(f"{_prefix(where)}'{path}' is missing", f"set {path}")
    got = first.get("input")
    if first["type"] == "tuple_type" and isinstance(got, str | int | float):
        listed = f"write {path} = {json.dumps([got])}"
        return SettingsError(f"{_prefix(where)}'{path}' is a list, got {got!r}", listed)
    shown = "" if isinstance(got, dict | BaseModel) else f", got {got!r}"
    return SettingsError(f"{_prefix(where)}'{path}': {message}{shown}", f"correct {path}")


def _of_union(root: type[Settings], problems: list[ErrorDetails]) -> ErrorDetails:
    """Return the first problem; of a value that fits none of several types, what says most."""
    first, key = problems[0], _key(root, problems[0]["loc"])
    same = [each for each in problems if _key(root, each["loc"])[: len(key)] == key]
    for each in same:
        if each["type"] != "literal_error" and not each["type"].endswith("_type"):
            return each
    other = dict.fromkeys(each["msg"].removeprefix("Input should be ") for each in same[1:])
    return {**first, "msg": " or ".join([first["msg"], *other])}


def _key(annotation: Any, loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return a place without what pydantic puts between its keys: which type of several failed."""
    if not loc or loc == ("[key]",):
        return ()
    inner = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _key(inner[0], loc)
    if get_origin(annotation) in (Union, UnionType):
        types = [each for each in inner if each is not NoneType]
        return min((_key(each, loc[len(types) > 1 :]) for each in types), key=len)
    below = inner[-2 if ... in inner else -1] if inner else None
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        field = annotation.model_fields.get(str(loc[0]))
        below = field.annotation if field else None
    return (*([str(loc[0])] if loc[0] != "" else []), *_key(below, loc[1:]))


def _siblings(root: type[Settings], loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the keys that a misspelt one at `loc` could have been."""
    model = root
    for part in loc[:-1]:
        if isinstance(part, str) and part in model.model_fields:
            model = settings_in(model.model_fields[part].annotation) or model
    return tuple(model.model_fields)


def settings_in(annotation: Any) -> type[Settings] | None:
    """Return the settings class inside of `X | None`, `tuple[X, ...]` or `X` itself."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation
    return next((found for part in get_args(annotation) if (found := settings_in(part))), None)


def first_difference(key: str, ours: Any, theirs: Any) -> str:
    """Return the first name below a key at which two documents differ, with both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                below = f"{key}.{name}" if key else name
                return first_difference(below, ours.get(name), theirs.get(name))
    return f"{key} is {theirs!r} there and {ours!r} here"
