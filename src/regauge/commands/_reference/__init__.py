"""Describes settings for people: type, bounds, default and help text of every key.

The descriptions are derived from pydantic's fields; a field's docstring is its help text.
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

from regauge import commands, config
from regauge.config.field_docs import read_field_docs
from regauge.config.validation import find_model
from regauge.system import choices, errors, stop_signals

_TYPE_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "table"}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}

settings_roots = commands.settings_roots


@dataclass(frozen=True)
class Key:
    """One table key."""

    path: str
    owner: type[config.Settings]
    """Class with the field."""
    name: str

    @property
    def field(self) -> FieldInfo:
        """The class's field."""
        return self.owner.model_fields[self.name]

    @property
    def table(self) -> type[config.Settings] | None:
        """The class of the table at this key; None if the key is a value or a choice."""
        return None if self.folder else find_model(self.field.annotation, config.Settings)

    @property
    def folder(self) -> str | None:
        """The folder with the choices for this key; None if the key is not a choice."""
        return next(_find_folders(self.field.annotation, self.field.metadata), None)

    def format_row(self) -> dict[str, str]:
        """Return the key's name, type, default and description."""
        return {
            "key": self.path,
            "type": self.format_type(),
            "default": format_default(self.field),
            "description": read_field_docs(self.owner).get(self.name, ""),
        }

    def format_type(self) -> str:
        """Return the type of the key's value, with bounds."""
        if self.folder:
            is_list = _is_list(self.field)
            return f"{'list of choices' if is_list else 'choice'} of {self.folder}"
        bounds = _format_bounds(self.field.metadata)
        return _format_type(self.field.annotation) + (f" {bounds}" if bounds else "")


def list_keys(model: type[config.Settings], prefix: str = "") -> Iterator[Key]:
    """Yield a table's keys; a nested table is replaced by its keys."""
    for name, field in model.model_fields.items():
        key = Key(f"{prefix}{name}", model, name)
        if key.table and not _is_list(field):
            yield from list_keys(key.table, f"{key.path}.")
        else:
            yield key


def list_folders() -> list[str]:
    """Return all folders whose choices a key accepts, sorted."""
    folders: set[str] = set()
    unvisited = list(settings_roots().values())
    while unvisited:
        for key in list_keys(unvisited.pop()):
            if key.folder and key.folder not in folders:
                folders.add(key.folder)
                unvisited += [choices.load(key.folder, name) for name in choices.names(key.folder)]
            elif key.table:
                unvisited.append(key.table)
    return sorted(folders)


def list_exit_codes() -> dict[int, str]:
    """Return exit code -> meaning."""
    codes = {
        0: "Success.",
        1: "An internal error of Regauge or of a library.",
    }
    for error in errors.RegaugeError.__subclasses__():
        if "exit_code" in vars(error):
            codes[error.exit_code] = first_docstring_line(error)
    for number in stop_signals.STOP_SIGNALS:
        code = errors.StopSignalError(number).exit_code
        codes[code] = f"{number.name} stopped the command; the same command resumes."
    return dict(sorted(codes.items()))


def first_docstring_line(documented: type[Any]) -> str:
    """Return the first line of a class docstring."""
    return (documented.__doc__ or "").strip().partition("\n")[0]


def format_default(field: FieldInfo) -> str:
    """Return a key's default value as JSON, or a word for it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "unset"
    items = value.values() if isinstance(value, dict) else (value,)
    if any(isinstance(item, BaseModel) for item in items):
        return "defaults of its keys"
    return json.dumps(value, default=str)


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _find_folders(annotation: Any, metadata: list[Any]) -> Iterator[str]:
    """Yield the folders added to an annotation by `config.choice_of`, at any depth."""
    for validator in metadata:
        function = validator.func if isinstance(validator, BeforeValidator) else None
        if isinstance(function, partial) and function.func is config.parse_choice:
            yield function.args[0]
    inner_metadata = getattr(annotation, "__metadata__", ())
    for argument in get_args(annotation):
        if not isinstance(argument, str):
            yield from _find_folders(argument, list(inner_metadata))


def _format_type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = _format_bounds(list(arguments[1:]))
        return _format_type(arguments[0]) + (f" {bounds}" if bounds else "")
    if origin is Literal:
        return " or ".join(json.dumps(value) for value in arguments)
    if origin in {Union, types.UnionType}:
        members = (member for member in arguments if member is not types.NoneType)
        return " or ".join(map(_format_type, members))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {_format_type(arguments[0])}"
        return f"[{', '.join(map(_format_type, arguments))}]"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return _TYPE_NAMES.get(origin or annotation, getattr(annotation, "__name__", "value").lower())


def _format_bounds(metadata: list[Any]) -> str:
    constraints = [part for item in metadata for part in getattr(item, "metadata", [item])]
    bounds = [
        f"{sign} {getattr(constraint, name)}"
        for constraint in constraints
        for name, sign in _BOUNDS.items()
        if getattr(constraint, name, None) is not None
    ]
    return " and ".join(bounds)
