"""The stages of a pipeline that repeats, in the folders of their input hashes.

    <pipeline>/<number>-<name>/<first digits of the input hash>

The hash of a stage covers its verb, its tables, its data, its custom code, the version of Regauge
and the hashes of its input stages. A stage with the same inputs therefore has the same folder, and
is finished if that folder is.

A value `@serving` is the model that serves. Training starts from the version that served when the
round began, which is no part of the hash. All other stages compare with the version that serves
now, which is part of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import __version__, commands, config
from regauge.commands import _stages
from regauge.data.sources._files import FileSource
from regauge.registry.pipelines.data_hashes import (
    DataHasher,
    find_sources,
    hash_custom_code,
    hash_document,
)
from regauge.registry.pipelines.serving_model import ServingModel
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from regauge.registry.pipelines.rounds import Round
    from regauge.registry.pipelines.settings import Repeat

SERVING = "@serving"
"""A value that stands for the model that serves; `@serving` alone is its folder."""
START_KEY = "model.init_from"
"""The table whose `@serving` is the version that training starts from."""
FOLDER_DIGITS = 12


@dataclass(frozen=True)
class RoundInputs:
    """What the stages of a round read from outside of the pipeline."""

    current: Round
    base: ServingModel | None
    """The model that training starts from."""
    serving: ServingModel | None
    """The model that the new one is compared with."""
    hasher: DataHasher


def list_increments(
    stages: tuple[_stages.Stage, ...],
    shared: config.Tables,
    repeat: Repeat,
) -> dict[str, tuple[str, ...]]:
    """Return the patterns of the files of each increment, by stage.

    Raises SettingsError for a stage that does not exist, or that reads no files.
    """
    by_name = {stage.name or stage.verb: stage for stage in stages}
    patterns = {}
    for name in repeat.increments:
        if name not in by_name:
            remedy = f"set repeat.increments to stages: {', '.join(by_name)}"
            raise SettingsError(f"repeat.increments names no stage '{name}'", remedy)
        source = config.merge(shared, dict(by_name[name].model_extra or {})).get("source")
        files = source.get("files") if isinstance(source, dict) else None
        if isinstance(files, str):
            files = (files,)
        if not files:
            problem = f"stage '{name}' of repeat.increments has no source.files"
            raise SettingsError(problem, "set source.files to a pattern, such as data/*.jsonl")
        patterns[name] = tuple(map(str, files))
    return patterns


def resolve_round(
    stages: tuple[_stages.Stage, ...],
    shared: config.Tables,
    folder: Path,
    inputs: RoundInputs,
) -> list[_stages.ResolvedStage]:
    """Return the stages of a round with their folders; raises SettingsError for an invalid one."""
    resolved: list[_stages.ResolvedStage] = []
    hashes: dict[str, str] = {}
    for number, stage in enumerate(stages, start=1):
        name, root = _stages.check_stage(stage, resolved)
        tables = root.complete_tables(_stages.merge_tables(stage, name, root, shared))
        tables = {key: table for key, table in tables.items() if key in root.model_fields}
        output_key = getattr(commands.import_verb(stage.verb), "OUTPUT", None)
        folders = {earlier.name: earlier.folder for earlier in resolved}
        references = _stages.References(name, folders)
        draft = _fill_tables(tables, name, inputs, root)
        _stages.set_output(draft, output_key, folder)
        draft = {key: references.replace(value) for key, value in draft.items()}
        settings = config.build(root, draft, commands.table_names(), f"stage '{name}'")
        names = tuple(sorted(references.used))
        identity = _compute_identity(
            stage, tables, settings, {key: hashes[key] for key in names}, inputs
        )
        hashes[name] = identity["sha256"]
        stage_folder = folder / f"{number}-{name}" / identity["sha256"][:FOLDER_DIGITS]
        _stages.set_output(draft, output_key, stage_folder)
        settings = config.build(root, draft, commands.table_names(), f"stage '{name}'")
        resolved.append(
            _stages.ResolvedStage(
                number, name, stage.verb, stage_folder, settings, names, fixed_identity=identity
            )
        )
    return resolved


def drop_serving(tables: config.Tables) -> config.Tables:
    """Return tables as they are while no version serves: without the values of `@serving`."""
    return _take_serving(tables, "", (None, None))[0]


def _fill_tables(
    tables: config.Tables, name: str, inputs: RoundInputs, root: type[config.Settings]
) -> config.Tables:
    """Return the tables with the files of the increment, and with the folders of `@serving`.

    Without a serving model, a key with `@serving` is left out, and a table whose `path` it is.
    """
    filled, serving = _take_serving(tables, "", (inputs.base, inputs.serving))
    if serving:
        filled = config.overlay_tables(filled, serving, root, f"stage '{name}'")
    if name in inputs.current.files:
        files = tuple(sorted(inputs.current.files[name]))
        filled = config.merge(filled, {"source": {"files": files}})
    return filled


def _take_serving(
    tables: config.Tables, key: str, models: tuple[ServingModel | None, ServingModel | None]
) -> tuple[config.Tables, config.Tables]:
    """Return the tables without values of `@serving`, and the tables of these values alone.

    `models`: the model that training starts from, and the one that the new model is compared with.
    """
    others: config.Tables = {}
    serving: config.Tables = {}
    for name, value in tables.items():
        path = f"{key}.{name}" if key else name
        if isinstance(value, dict) and value:
            rest, replaced = _take_serving(value, path, models)
            has_path = value.get("path") == SERVING
            if replaced:
                serving[name] = config.merge(rest, replaced) if has_path else replaced
            if rest and not has_path:
                others[name] = rest
        elif value == SERVING:
            model = models[0 if path.startswith(START_KEY) else 1]
            if model is not None:
                folder = model.start if path.startswith(START_KEY) else model.artifact
                serving[name] = str(folder)
        else:
            others[name] = value
    return others, serving


def _compute_identity(
    stage: _stages.Stage,
    tables: config.Tables,
    settings: config.Settings,
    input_hashes: dict[str, str],
    inputs: RoundInputs,
) -> dict[str, Any]:
    """Return everything that determines the result of a stage, with its SHA-256."""
    document = {
        "verb": stage.verb,
        "settings": _describe_tables(stage, tables),
        "inputs": input_hashes,
        "data": {
            key: hashes
            for key, source in find_sources(settings)
            if (hashes := _hash_source(source, tables, key, inputs))
        },
        "code": {"regauge": __version__, **hash_custom_code(settings)},
        "serving": _find_compared(tables, inputs),
    }
    return {**document, "sha256": hash_document(document)}


def _describe_tables(stage: _stages.Stage, tables: config.Tables) -> config.Tables:
    """Return the tables of a stage without its output folder, as JSON stores them."""
    described = {name: table for name, table in tables.items() if name != "output"}
    output = tables.get("output")
    if isinstance(output, dict):
        described["output"] = {key: value for key, value in output.items() if key != "folder"}
    key = getattr(commands.import_verb(stage.verb), "OUTPUT", None) or ""
    table = described.get(key.partition(".")[0])
    if isinstance(table, dict):
        described[key.partition(".")[0]] = {
            name: value for name, value in table.items() if name != key.rpartition(".")[2]
        }
    normalized: config.Tables = json.loads(json.dumps(described, sort_keys=True, default=str))
    return normalized


def _hash_source(
    source: Any, tables: config.Tables, key: str, inputs: RoundInputs
) -> dict[str, str]:
    """Return the hashes of a source; nothing if it reads the output of an earlier stage."""
    table: Any = tables
    for part in key.split("."):
        table = table.get(part, {}) if isinstance(table, dict) else {}
    files = table.get("files", ()) if isinstance(table, dict) else ()
    files = (files,) if isinstance(files, str) else files
    if isinstance(source, FileSource) and any(str(item).startswith("@") for item in files):
        return {}
    return inputs.hasher.hash_source(source)


def _find_compared(tables: config.Tables, inputs: RoundInputs) -> str | None:
    """Return the version that a stage compares with; None if it refers to none."""
    values = [
        key
        for key, value in config.flatten(tables)
        if value == SERVING and not key.startswith(START_KEY)
    ]
    return inputs.serving.version if values and inputs.serving is not None else None
