"""Describes settings for people: type, bounds, default and help text of every key.

The descriptions are derived from pydantic's fields; a field's docstring is its help text.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from regauge import commands, config
from regauge.config.field_docs import read_field_docs
from regauge.config.validation import find_model
from regauge.system import choices, errors, stop_signals

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext

_TYPE_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "table"}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
settings_roots = commands.settings_roots
_HEAD = """\
# Settings

Written by `regauge explain --markdown > docs/reference/settings.md`. Values are TOML. A *choice* is
a table with a `kind`, or the name of the kind alone."""


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
    kinds = errors.RegaugeError.__subclasses__()
    for error in (*kinds, *(nested for kind in kinds for nested in kind.__subclasses__())):
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


def complete_override(context: CompletionContext) -> dict[str, str]:
    """Return matching `key=` assignments -> description."""
    prefix = context.incomplete
    return {
        f"{path}=": key.format_row()["description"]
        for path, key in list_assignable_keys()
        if path.startswith(prefix)
    }


def list_assignable_keys() -> Iterator[tuple[str, Key]]:
    """Yield all verbs' keys, and below a choice the keys for each kind."""
    for root in settings_roots().values():
        for key in list_keys(root):
            yield key.path, key
            for name in choices.names(key.folder) if key.folder else ():
                for inner_key in list_keys(choices.load(str(key.folder), name)):
                    yield f"{key.path}.{inner_key.path}", inner_key


def build_page() -> str:
    lines = [_HEAD, *_format_verbs(), *_format_tables(), *_format_choices(), *_format_exit_codes()]
    return "\n".join(lines) + "\n"


def _format_verbs() -> Iterator[str]:
    """Yield a row for each verb, with links to its tables."""
    links: dict[str, list[str]] = {}
    for heading, name, verbs in _list_tables():
        for verb in verbs:
            links.setdefault(verb, []).append(f"[`{name}`](#{_slugify(heading)})")
    yield "\n## Verbs\n"
    yield from _format_rows(
        ("verb", "description", "tables"),
        (
            (f"`{verb}`", choices.summary("verbs", verb.split()[0]), ", ".join(links.get(verb, ())))
            for verb in sorted({*choices.names("verbs"), *settings_roots()})
        ),
    )


def _list_tables() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the heading and key of each distinct table, and the verbs that read it."""
    readers: dict[tuple[str, type[config.Settings] | None, str], list[str]] = {}
    for verb, root in settings_roots().items():
        for name in root.model_fields:
            key = Key(name, root, name)
            identity = (name, key.table, "" if key.table else str(key.format_row()))
            readers.setdefault(identity, []).append(verb)
    names = [name for name, _, _ in readers]
    for (name, _, _), verbs in sorted(readers.items(), key=lambda item: item[0][0]):
        suffix = f" of {', '.join(verbs)}" if names.count(name) > 1 else ""
        yield f"{name}{suffix}", name, verbs


def _slugify(heading: str) -> str:
    """Return the anchor that MkDocs gives a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading)).lower()


def _format_tables() -> Iterator[str]:
    yield "\n## Tables and keys"
    for heading, name, verbs in _list_tables():
        yield f"\n### {heading}\n"
        root = settings_roots()[verbs[0]]
        key = Key(name, root, name)
        if key.table:
            yield f"{first_docstring_line(key.table)} Read by {_format_names(verbs)}.\n"
            yield from _format_keys(list_keys(key.table, f"{name}."))
        else:
            yield f"Read by {_format_names(verbs)}.\n"
            yield from _format_keys([key])


def _format_choices() -> Iterator[str]:
    yield "\n## Choices"
    for folder in list_folders():
        for name in choices.names(folder):
            yield f"\n### {folder}/{name}\n"
            choice = choices.load(folder, name)
            yield f"{choices.summary(folder, name)}"
            keys = list(list_keys(choice))
            if keys:
                yield ""
                yield from _format_keys(keys)


def _format_exit_codes() -> Iterator[str]:
    yield "\n## Exit codes\n"
    codes = list_exit_codes().items()
    yield from _format_rows(("code", "description"), ((str(code), text) for code, text in codes))


def _format_keys(keys: Iterable[Key]) -> Iterator[str]:
    rows = [key.format_row() for key in keys]
    cells = (
        (f"`{row['key']}`", row["type"], f"`{row['default']}`", row["description"]) for row in rows
    )
    yield from _format_rows(("key", "type", "default", "description"), cells)


def _format_rows(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for row in (header, ("---",) * len(header), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
