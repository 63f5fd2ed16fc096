"""Parses run files into strict, frozen settings.

A run file is TOML or JSON. Each verb has one settings root. A run file may contain tables for
several verbs: a verb reads the tables of its root, and every other name must belong to another
verb. This module knows neither verbs nor choices; callers pass the root.
"""

from __future__ import annotations

import copy
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from regauge.config.output_files import SAVED_RUN
from regauge.config.validation import convert_error, describe_unknown_key, find_model
from regauge.system import choices, files
from regauge.system.errors import DataError, SettingsError
from regauge.system.json_files import (
    DocumentShape,
    check_depth,
    check_shape,
    find_json,
    parse_object,
    read_json,
)
from regauge.system.log import logger

FORMAT = 2
"""Version of every JSON document that Regauge writes; `check_format` refuses any other."""

RUN_FILE_SUFFIXES = (".json", ".toml")
OTHER_FORMATS = {
    ".cfg": "INI",
    ".ini": "INI",
    ".py": "Python",
    ".yaml": "YAML",
    ".yml": "YAML",
}
"""Suffix -> format of configuration files that cannot be run files."""
MANIFEST = "manifest.json"
"""Document in a dataset or artifact folder."""
REPEAT_RUN = "repeat the run from its run file"
RUN_IDENTITY = "run"
"""Table in `run.json` that identifies the run; not a setting."""

Tables = dict[str, Any]
_CONVERTED_TYPES = {"lax-or-strict", "list", "tuple"}
"""Core schema types of lists, and of classes such as `Path` that pydantic converts from a text."""
_HOME = re.compile(r"~[\w.-]*/")
"""A user's home folder at the start of a path."""


def _accept_run_file_forms(schema: Any) -> None:
    """Convert lists and paths in a core schema; their items stay strict."""
    if isinstance(schema, dict):
        if schema.get("type") in _CONVERTED_TYPES:
            schema["strict"] = False
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for item in schema:
            _accept_run_file_forms(item)


class Settings(BaseModel):
    """A frozen settings table; field docstrings are the help texts."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    exclusive_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Key -> keys that cannot be set with it; overriding the key removes them."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Let a list or a path read what a run file can contain."""
        schema = handler(source)
        _accept_run_file_forms(schema)
        return schema

    @classmethod
    def complete_tables(cls, tables: Tables) -> Tables:
        """Return the run file tables with defaults that follow from other tables."""
        return tables


class KindTable(Settings):
    """Settings with a `kind` key whose value can replace the table: `schedule = "cosine"`."""

    @model_validator(mode="before")
    @classmethod
    def _read_kind(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value


class Choice(Settings):
    """Settings whose class is selected by `kind`, the name of the file that defines it."""

    kind: ClassVar[str]
    peer_names: ClassVar[tuple[str, ...]] = ()
    """What other systems call this choice, for messages about unknown choices."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        stem = cls.__module__.rsplit(".", maxsplit=1)[-1]
        if not stem.startswith("_") and "kind" not in vars(cls):
            cls.kind = stem.rstrip("_").replace("_", "-")

    @model_serializer(mode="wrap")
    def _with_kind(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"kind": type(self).kind, **handler(self)}


def choice_of(folder: str) -> BeforeValidator:
    """Mark a field whose value is a choice from a folder.

    For example:

        task: Annotated[SerializeAsAny[Task], choice_of("tasks")]
    """
    return BeforeValidator(partial(parse_choice, folder))


def parse_choice(folder: str, value: Any) -> Any:
    """Convert a table with a `kind`, or just a name, to the settings of that choice."""
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, dict):
        return value
    kind = value.get("kind")
    if not isinstance(kind, str):
        category = choices.name_category(folder)
        wrong_type = f"the kind of the {category} must be a name, got {kind!r}"
        problem = wrong_type if "kind" in value else f"the kind of the {category} is missing"
        raise SettingsError(problem, f"set kind to one of: {', '.join(choices.names(folder))}")
    choice = choices.load(folder, kind)
    rest = {key: item for key, item in value.items() if key != "kind"}
    try:
        return choice.model_validate(rest)
    except ValidationError as error:
        raise convert_error(error, choice, f"{choices.name_category(folder)} '{kind}'") from None


class RunIdentity(DocumentShape):
    """Table in `run.json` that identifies the run."""

    format: int
    run_id: str
    data_fingerprint: str


class SavedTask(DocumentShape):
    """One of several tasks in `run.json`."""

    name: str
    data: dict[str, Any] | None = None
    batch: dict[str, Any] = {}


class SavedBatch(DocumentShape):
    """The resolved `batch` table in `run.json`."""

    rows: int = Field(ge=1)
    microbatch_rows: Annotated[int, Field(ge=1)] | Literal["auto"]


class BatchTable(DocumentShape):
    """The batch of a `run.json`."""

    batch: SavedBatch


class SavedRun(DocumentShape):
    """The `run.json` tables that readers need."""

    run: RunIdentity
    seed: int
    task: dict[str, Any] | list[SavedTask]
    model: dict[str, Any]
    optimizer: dict[str, Any]
    data: dict[str, Any]
    batch: SavedBatch
    execution: dict[str, Any]


S = TypeVar("S", bound=Settings)


def read(path: Path | str) -> Tables:
    """Read a TOML or JSON run file, such as a saved `run.json`, as nested tables."""
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        if other_format := OTHER_FORMATS.get(path.suffix.lower()):
            problem = f"{path} is {other_format}, but run files are TOML or JSON"
            raise SettingsError(problem, "write it as TOML, as the examples of 'regauge init'")
        tables = parse_object(text) if path.suffix == ".json" else tomllib.loads(text)
        check_depth(tables)
    except FileNotFoundError:
        kind = "run file" if path.suffix else "file or folder"
        remedy = "name an existing one, or write a run file with 'regauge init'"
        raise SettingsError(f"no {kind} {path}", remedy) from None
    except IsADirectoryError:
        raise SettingsError(f"{path} is a folder", "name a run file (.toml or .json)") from None
    except (ValueError, RecursionError) as error:
        is_run_file = path.suffix in RUN_FILE_SUFFIXES
        remedy = "correct that file" if is_run_file else "name a run file (.toml or .json)"
        raise SettingsError(f"{path} cannot be read: {error}", remedy) from None
    if RUN_IDENTITY in tables:
        _check_saved_run(tables, path, REPEAT_RUN)
    return _drop_identity(tables)


def read_saved_run(folder: Path) -> Tables:
    """Read the settings in a run folder as nested tables.

    Raises SettingsError for a dataset or artifact folder, and DataError if `run.json` is missing or
    damaged.
    """
    path = folder / SAVED_RUN
    document = find_saved_run(folder, REPEAT_RUN)
    if document is None and (folder / MANIFEST).exists():
        problem = f"{folder} is a dataset or an artifact, not a run's output folder"
        raise SettingsError(problem, "name a run's output folder")
    if document is None:
        raise DataError(f"{path} is missing", REPEAT_RUN)
    return _drop_identity(document)


def find_saved_run(folder: Path, remedy: str) -> Tables | None:
    """Return a run folder's `run.json`, or None without one; raises DataError if it is damaged."""
    path = folder / SAVED_RUN
    document = find_json(path, remedy)
    if document is not None:
        _check_saved_run(document, path, remedy)
    return document


def is_saved_run(path: Path) -> bool:
    """Return whether a file is a saved `run.json`, not a run file with this name."""
    document = find_json(path, REPEAT_RUN) if path.name == SAVED_RUN else None
    return document is not None and RUN_IDENTITY in document


def read_microbatch_rows(folder: Path) -> int | Literal["auto"]:
    """Return the microbatch size of a run folder, or "auto" if unknown."""
    try:
        document = read_json(folder / SAVED_RUN, REPEAT_RUN, BatchTable)
    except DataError:
        return "auto"
    rows: int | Literal["auto"] = document["batch"]["microbatch_rows"]
    return rows


def _check_saved_run(document: Tables, path: Path, remedy: str) -> None:
    """Raise DataError if `run.json` has another format or shape."""
    check_format(document.get(RUN_IDENTITY), path, remedy)
    check_shape(document, path, remedy, SavedRun)


def _drop_identity(tables: Tables) -> Tables:
    return {name: _convert_value(table) for name, table in tables.items() if name != RUN_IDENTITY}


def find_document(
    path: Path, remedy: str, shape: type[DocumentShape] = DocumentShape
) -> dict[str, Any] | None:
    """Return a JSON document written by Regauge, or None if the file does not exist.

    Raises DataError with the remedy if the document is damaged, or has another format or shape.
    """
    document = find_json(path, remedy)
    if document is not None:
        check_format(document, path, remedy)
        check_shape(document, path, remedy, shape)
    return document


def apply_overrides(tables: Tables, assignments: tuple[str, ...], *roots: type[Settings]) -> Tables:
    """Return the tables with `key.path=value` assignments applied.

    Values are parsed as TOML; anything else is text. With settings roots, an assignment also
    removes the run file keys that exclude it.
    """
    result = copy.deepcopy(tables)
    assigned = [_split_assignment(assignment) for assignment in assignments]
    _remove_excluded(result, [tuple(path) for path, _ in assigned], roots, "the run file")
    for path, text in assigned:
        table: Any = result
        model = next((root for root in roots if path[0] in root.model_fields), None)
        *parents, last_key = path
        for depth, parent in enumerate(parents, start=1):
            model = _find_table_class(model, parent)
            table = _get_table(table, parent, is_abbreviated=_has_kind(model))
            _check_table(table, path, depth)
        table[last_key] = _parse_value(text)
    return {name: _convert_value(table) for name, table in result.items()}


def overlay_tables(tables: Tables, overlay: Tables, root: type[Settings], location: str) -> Tables:
    """Return the tables with every leaf of `overlay` applied; keys excluded by a leaf are removed.

    `location` names `tables` when a replaced key is logged.
    """
    result = copy.deepcopy(tables)
    paths = [tuple(key.split(".")) for key, _ in flatten(overlay)]
    _remove_excluded(result, paths, (root,), location)
    return merge(result, overlay)


def _split_assignment(assignment: str) -> tuple[list[str], str]:
    key, equals, text = assignment.partition("=")
    if not equals or not key:
        raise SettingsError(f"'{assignment}' is not an assignment", "write key.path=value")
    return key.strip().split("."), text.strip()


def _check_table(table: Any, path: list[str], depth: int) -> None:
    """Raise SettingsError if the value at the first `depth` parts of a key is not a table."""
    key, parent = ".".join(path), path[depth - 1]
    if isinstance(table, tuple) and depth == len(path) - 1:
        names = [str(item["name"]) for item in table if isinstance(item, dict) and "name" in item]
        remedy = f"name one of them: {', '.join(names)}" if names else "write the whole list"
        raise SettingsError(f"'{parent}' in '{key}' is a list", remedy)
    if not isinstance(table, dict | tuple):
        raise SettingsError(f"'{parent}' in '{key}' is not a table", "assign to a key of a table")


def _get_table(parent: Any, name: str, *, is_abbreviated: bool) -> Any:
    """Return a child table, creating it if missing, or a list of tables.

    `is_abbreviated`: a text stands for a table with this `kind`.
    """
    if isinstance(parent, dict):
        if is_abbreviated and isinstance(parent.get(name), str):
            parent[name] = {"kind": parent[name]}
        return parent.setdefault(name, {})
    tables = (item for item in parent if isinstance(item, dict))
    return next((table for table in tables if table.get("name") == name), None)


def _find_table_class(model: type[Settings] | None, name: str) -> type[Settings] | None:
    """Return the settings class at a key; for a choice, its base class."""
    field = model.model_fields.get(name) if model else None
    return find_model(field.annotation, Settings) if field else None


def _has_kind(model: type[Settings] | None) -> bool:
    return model is not None and issubclass(model, Choice | KindTable)


def _remove_excluded(
    tables: Tables,
    paths: Sequence[tuple[str, ...]],
    roots: Sequence[type[Settings]],
    location: str,
) -> None:
    """Remove keys that exclude an assigned key or its table, unless they are assigned, too."""
    for path in paths:
        table: Any = tables
        model = next((root for root in roots if path[0] in root.model_fields), None)
        for depth, key in enumerate(path):
            if model is None or not isinstance(table, dict):
                break
            for other in model.exclusive_keys.get(key, ()):
                twin = (*path[:depth], other)
                if other in table and not any(item[: depth + 1] == twin for item in paths):
                    del table[other]
                    names = ".".join(path[: depth + 1]), ".".join(twin)
                    logger.info("%s replaces %s of %s", *names, location)
            table, model = table.get(key), _find_table_class(model, key)


def merge(base: Tables, overlay: Tables) -> Tables:
    """Return `base` with every leaf of `overlay` applied.

    A table with another `kind` replaces the whole table in `base`.
    """
    result = dict(base)
    for key, value in overlay.items():
        old = result.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            is_same_kind = "kind" not in value or value["kind"] == old.get("kind")
            result[key] = merge(old, value) if is_same_kind else value
        else:
            result[key] = value
    return result


def build(root: type[S], tables: Tables, other_tables: tuple[str, ...] = (), source: str = "") -> S:
    """Build a verb's settings from run file tables.

    `other_tables` are table names of other verbs, which are ignored. `source` names the run file in
    messages. Raises SettingsError, with the closest known name for an unknown one.
    """
    fields = tuple(root.model_fields)
    for name in tables:
        if name not in fields and name not in other_tables:
            siblings = tuple({*fields, *other_tables})
            problem, remedy = describe_unknown_key(name, siblings, root)
            raise SettingsError(f"{_format_location(source)}{problem}", remedy)
    try:
        completed = root.complete_tables(_convert_value(tables))
        root_tables = {name: value for name, value in completed.items() if name in fields}
        return root.model_validate(_convert_value(root_tables))
    except SettingsError as error:
        raise (error.add_location(source) if source else error) from None
    except ValidationError as error:
        raise convert_error(error, root, source) from None


def dump(settings: Settings, *, with_defaults: bool = True) -> Tables:
    """Return settings as JSON-ready tables, from which `build` restores them."""
    return settings.model_dump(mode="json", exclude_none=True, exclude_defaults=not with_defaults)


def flatten(tree: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    """Return (dotted key, leaf) pairs of nested tables; a list is a leaf."""
    leaves: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{path}.{name}" if path else name
        leaves += flatten(value, key) if isinstance(value, dict) and value else [(key, value)]
    return leaves


def check_format(document: object, path: Path | str, remedy: str) -> None:
    """Raise DataError if a JSON document does not have the current FORMAT.

    `remedy` replaces an older document, such as "run 'regauge prepare' again".
    """
    version = document.get("format") if isinstance(document, dict) else None
    if not isinstance(version, int):
        raise DataError(f"{path} has no format version", remedy)
    if version > FORMAT:
        problem = f"{path} was written by a later Regauge (format {version})"
        raise DataError(problem, f"install the Regauge that reads format {version}")
    if version < FORMAT:
        raise DataError(f"{path} was written by an earlier Regauge (format {version})", remedy)


def save(path: Path, document: Tables) -> None:
    """Write a JSON document with its format version, atomically."""
    text = files.format_json({"format": FORMAT, **document}, indent=2, sort_keys=True, default=str)
    files.write_atomic(path, text + "\n")


def _format_location(source: str) -> str:
    return f"{source}: " if source else ""


def _parse_value(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
        check_depth(value)
    except (ValueError, RecursionError):
        return text
    return value


def _convert_value(value: Any) -> Any:
    """Convert lists to tuples, and expand a leading `~/`."""
    if isinstance(value, dict):
        return {key: _convert_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_convert_value(item) for item in value)
    if isinstance(value, str) and _HOME.match(value):
        return os.path.expanduser(value)  # noqa: PTH111 (the text may be a pattern)
    return value


def describe_first_difference(key: str, ours: Any, theirs: Any) -> str:
    """Describe the first key at which two documents differ, with both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                path = f"{key}.{name}" if key else name
                return describe_first_difference(path, ours.get(name), theirs.get(name))
    return f"{key} is {format_setting(theirs)}, not {format_setting(ours)}"


def format_setting(setting: Any) -> str:
    return "unset" if setting is None else repr(setting)
