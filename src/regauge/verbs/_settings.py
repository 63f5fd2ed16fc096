"""Settings as people read them: type, default, bounds and help of every key, out of the classes.

Everything here is derived from pydantic's fields; a field's docstring is its help.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from regauge import choices, config, errors, verbs

_WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "table"}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}

roots = verbs.roots


@dataclass(frozen=True)
class Key:
    """One key of a table."""

    path: str
    field: FieldInfo

    @property
    def table(self) -> type[config.Settings] | None:
        """The class of the table under this key, unless choices fill it."""
        return None if self.folder else config.settings_in(self.field.annotation)

    @property
    def folder(self) -> str | None:
        """The folder whose choices fill this key."""
        return next(_folders(self.field.annotation, self.field.metadata), None)

    def row(self) -> dict[str, str]:
        """Return the key as texts."""
        return {
            "key": self.path,
            "type": self.type_text(),
            "default": default_text(self.field),
            "help": " ".join((self.field.description or "").split()),
        }

    def type_text(self) -> str:
        """Return the type of the values, with their bounds."""
        if self.folder:
            many = get_origin(self.field.annotation) is tuple
            return f"{'list of choices' if many else 'choice'} of {self.folder}"
        bounds = _bounds_text(self.field.metadata)
        return _type_text(self.field.annotation) + (f" {bounds}" if bounds else "")


def keys(model: type[config.Settings], prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a table, and those of the tables inside of it instead of these."""
    for name, field in model.model_fields.items():
        key = Key(f"{prefix}{name}", field)
        if key.table and not _many(field):
            yield from keys(key.table, f"{key.path}.")
        else:
            yield key


def folders() -> list[str]:
    """Return every folder of choices that some key takes, sorted."""
    found: set[str] = set()
    waiting = list(roots().values())
    while waiting:
        for key in keys(waiting.pop()):
            if key.folder and key.folder not in found:
                found.add(key.folder)
                waiting += [choices.load(key.folder, name) for name in choices.names(key.folder)]
            elif key.table:
                waiting.append(key.table)
    return sorted(found)


def exit_codes() -> dict[int, str]:
    """Return what every exit code means."""
    codes = {
        0: "Done.",
        1: "A fault of Regauge or of a library.",
        errors.INTERRUPTED: "Interrupted; the same command continues.",
    }
    for error in errors.RegaugeError.__subclasses__():
        if "exit_code" in vars(error):
            codes[error.exit_code] = summary(error)
    return dict(sorted(codes.items()))


def summary(documented: type[Any]) -> str:
    """Return the first line of a class's docstring."""
    return (documented.__doc__ or "").strip().partition("\n")[0]


def default_text(field: FieldInfo) -> str:
    """Return what a key is when it is left out."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "unset"
    inside = value.values() if isinstance(value, dict) else (value,)
    if any(isinstance(item, BaseModel) for item in inside):
        return "its defaults"
    return json.dumps(value, default=str)


def _many(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _folders(annotation: Any, metadata: list[Any]) -> Iterator[str]:
    """Yield the folders that `config.chosen` put into an annotation, at any depth."""
    for mark in metadata:
        function = mark.func if isinstance(mark, BeforeValidator) else None
        if isinstance(function, partial) and function.func is config.choose:
            yield function.args[0]
    inside = getattr(annotation, "__metadata__", ())
    for part in get_args(annotation):
        if not isinstance(part, str):
            yield from _folders(part, list(inside))


def _type_text(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = _bounds_text(list(parts[1:]))
        return _type_text(parts[0]) + (f" {bounds}" if bounds else "")
    if origin is Literal:
        return " or ".join(json.dumps(part) for part in parts)
    if origin in {Union, types.UnionType}:
        return " or ".join(_type_text(part) for part in parts if part is not types.NoneType)
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return f"list of {_type_text(parts[0])}"
        return f"[{', '.join(_type_text(part) for part in parts)}]"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return _WORDS.get(origin or annotation, getattr(annotation, "__name__", "value").lower())


def _bounds_text(metadata: list[Any]) -> str:
    marks = [mark for item in metadata for mark in getattr(item, "metadata", [item])]
    found = [
        f"{sign} {getattr(mark, name)}"
        for mark in marks
        for name, sign in _BOUNDS.items()
        if getattr(mark, name, None) is not None
    ]
    return " and ".join(found)
