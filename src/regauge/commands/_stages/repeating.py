"""Inputs of a repeating pipeline's round, and the hashes that name stage folders.

A stage hash covers its verb, tables, data, custom code, Regauge version and the hashes of its input
stages. A stage with the same inputs therefore has the same folder, and is finished if that folder
is.

A value `@serving` is the serving model. Training starts from the version that served when the round
began, which is not part of the hash. All other stages compare with the version that serves now,
which is part of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge import __version__, config
from regauge.commands._stages import Stage, find_output, seal_identity
from regauge.data.input_hashes import InputHashes, find_sources, hash_custom_code
from regauge.data.sources._files import FileSource
from regauge.registry.pipelines.serving_model import ServingModel
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from regauge.data.sources import Source
    from regauge.registry.pipelines.rounds import Round
    from regauge.registry.pipelines.settings import Repeat

SERVING = "@serving"
"""Stands for the serving model; `@serving` alone is its folder."""
START_KEY = "model.init_from"
"""Table whose `@serving` is the start version for training."""


@dataclass(frozen=True)
class RoundInputs:
    """A round's inputs from outside the pipeline."""

    current: Round
    base: ServingModel | None
    """Start model for training."""
    serving: ServingModel | None
    """Model to compare the new one with."""
    hashes: InputHashes

    def fill(self, tables: config.Tables, name: str, root: type[config.Settings]) -> config.Tables:
        """Return the tables with the increment's files, and with the folders of `@serving`.

        Without a serving model, keys with `@serving` are left out, and so are tables whose `path`
        it is.
        """
        filled, serving = _take_serving(tables, "", (self.base, self.serving))
        if serving:
            filled = config.overlay_tables(filled, serving, root, f"stage '{name}'")
        if name in self.current.files:
            files = tuple(sorted(self.current.files[name]))
            filled = config.merge(filled, {"source": {"files": files}})
        return filled

    def identify(
        self,
        stage: Stage,
        tables: config.Tables,
        settings: config.Settings,
        input_hashes: dict[str, str],
    ) -> dict[str, Any]:
        """Return everything that determines a stage's result, with its SHA-256.

        `tables` come from the run file, and `settings` has this round's data.
        """
        data = {
            key: hashes
            for key, source in find_sources(settings)
            if not _reads_stage(source, tables, key) and (hashes := self.hashes.hash_source(source))
        }
        leaves = config.flatten(tables)
        is_compared = any(
            value == SERVING and not key.startswith(START_KEY) for key, value in leaves
        )
        return seal_identity(
            {
                "verb": stage.verb,
                "settings": _describe_tables(stage, tables),
                "inputs": input_hashes,
                "data": data,
                "code": {"regauge": __version__, **hash_custom_code(settings)},
                "serving": self.serving.version if is_compared and self.serving else None,
            }
        )


def list_increments(
    stages: tuple[Stage, ...], shared: config.Tables, repeat: Repeat
) -> dict[str, tuple[str, ...]]:
    """Return stage -> file patterns for each increment.

    Raises SettingsError for a stage that does not exist, or that does not read files.
    """
    by_name = {stage.name or stage.verb: stage for stage in stages}
    patterns = {}
    for name in repeat.increments:
        if name not in by_name:
            remedy = f"set repeat.increments to stages: {', '.join(by_name)}"
            raise SettingsError(f"repeat.increments names an unknown stage '{name}'", remedy)
        source = config.merge(shared, dict(by_name[name].model_extra or {})).get("source")
        files = source.get("files") if isinstance(source, dict) else None
        if isinstance(files, str):
            files = (files,)
        if not files:
            problem = f"stage '{name}' in repeat.increments does not set source.files"
            raise SettingsError(problem, "set source.files to a pattern, such as data/*.jsonl")
        patterns[name] = tuple(map(str, files))
    return patterns


def drop_serving(tables: config.Tables) -> config.Tables:
    """Return tables as they are while no version serves: without `@serving` values."""
    return _take_serving(tables, "", (None, None))[0]


def _take_serving(
    tables: config.Tables, key: str, models: tuple[ServingModel | None, ServingModel | None]
) -> tuple[config.Tables, config.Tables]:
    """Return the tables without `@serving` values, and the tables with these values alone.

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


def _describe_tables(stage: Stage, tables: config.Tables) -> config.Tables:
    described = dict(tables)
    for key in ("output.folder", find_output(stage.verb)):
        name, _, last = key.rpartition(".")
        table = described.get(name)
        if isinstance(table, dict):
            described[name] = {key: value for key, value in table.items() if key != last}
    normalized: config.Tables = json.loads(json.dumps(described, sort_keys=True, default=str))
    return normalized


def _reads_stage(source: Source, tables: config.Tables, key: str) -> bool:
    """Return whether a source reads files from an earlier stage, whose hash is already an input."""
    table: Any = tables
    for part in (*key.split("."), "files"):
        table = table.get(part, ()) if isinstance(table, dict) else ()
    names = (table,) if isinstance(table, str) else table
    return isinstance(source, FileSource) and any(str(name).startswith("@") for name in names)
