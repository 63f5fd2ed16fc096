"""The stages of a pipeline with resolved settings, and the record of a finished stage.

A value that starts with `@name` refers to the output folder of the stage `name`; `@@` is a literal
`@`. This module runs no verb.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from regauge import commands, config
from regauge.commands._stages.status import DONE
from regauge.system import choices
from regauge.system.errors import SettingsError

_STAGE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


class Stage(config.Settings):
    """One verb of a pipeline; its other tables override the shared tables of the same name."""

    model_config = ConfigDict(extra="allow")

    verb: str
    """The verb of this stage, with a flag if the flag reads other tables."""
    name: str | None = None
    """Stage and folder name; `@name` in a later stage is that folder. By default the verb."""


@dataclass(frozen=True)
class ResolvedStage:
    """A stage with its resolved settings, its folder and the names of its input stages."""

    number: int
    name: str
    verb: str
    folder: Path
    settings: config.Settings
    inputs: tuple[str, ...]
    fixed_identity: dict[str, Any] | None = None
    """The identity of a stage of a pipeline that repeats; its folder has the name of its hash."""

    def compute_identity(self, input_hashes: dict[str, str]) -> dict[str, Any]:
        """Return everything that determines this stage's result, with its SHA-256.

        `input_hashes` has the hashes of earlier stages by name.
        """
        if self.fixed_identity is not None:
            return self.fixed_identity
        document = {
            "verb": self.verb,
            "settings": config.dump(self.settings),
            "inputs": {name: input_hashes[name] for name in self.inputs},
        }
        text = json.dumps(document, sort_keys=True)
        return {**document, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def resolve_stages(
    stages: tuple[Stage, ...], shared: config.Tables, folder: Path
) -> list[ResolvedStage]:
    """Build the settings of every stage; raises SettingsError for the first invalid stage.

    `shared` and the stages already include the overrides of the command line.
    """
    resolved_stages: list[ResolvedStage] = []
    for number, stage in enumerate(stages, start=1):
        name, root = check_stage(stage, resolved_stages)
        stage_folder = folder / f"{number}-{name}"
        tables = root.complete_tables(merge_tables(stage, name, root, shared))
        output_key = getattr(commands.import_verb(stage.verb), "OUTPUT", None)
        set_output(tables, output_key, stage_folder)
        earlier_folders = {earlier.name: earlier.folder for earlier in resolved_stages}
        references = References(name, earlier_folders)
        resolved = {
            key: references.replace(value) if key in root.model_fields else value
            for key, value in tables.items()
        }
        settings = config.build(root, resolved, commands.table_names(), f"stage '{name}'")
        inputs = tuple(sorted(references.used))
        resolved_stages.append(
            ResolvedStage(number, name, stage.verb, stage_folder, settings, inputs)
        )
    return resolved_stages


def save_outcome(
    stage: ResolvedStage, input_hashes: dict[str, str], outcome: dict[str, Any]
) -> str:
    """Record that a stage is finished; return its hash, which is part of later identities."""
    identity = stage.compute_identity(input_hashes)
    stage.folder.mkdir(parents=True, exist_ok=True)
    config.save(stage.folder / DONE, {**identity, **outcome})
    return str(identity["sha256"])


def check_stage(stage: Stage, earlier: list[ResolvedStage]) -> tuple[str, type[config.Settings]]:
    """Return the name and the settings root of a stage; raises SettingsError for an invalid one."""
    name = _check_name(stage, earlier)
    return name, _find_root(stage.verb, name)


class References:
    """Replaces `@name` with the folder of an earlier stage, and collects the used names."""

    def __init__(self, stage: str, folders: dict[str, Path]) -> None:
        self.stage = stage
        self.folders = folders
        self.used: set[str] = set()

    def replace(self, value: Any) -> Any:
        """Return a value with the folders of its references."""
        if isinstance(value, dict):
            return {key: self.replace(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return tuple(self.replace(item) for item in value)
        if isinstance(value, str) and value.startswith("@"):
            return value[1:] if value.startswith("@@") else self._folder(value)
        return value

    def _folder(self, reference: str) -> str:
        name, slash, rest = reference[1:].partition("/")
        if name not in self.folders:
            remedy = (
                choices.did_you_mean(name, tuple(self.folders))
                if self.folders
                else "the first stage has no earlier stage; write @@ for a literal @"
            )
            raise SettingsError(
                f"stage '{self.stage}': '{reference}' names no earlier stage", remedy
            )
        self.used.add(name)
        return str(self.folders[name] / rest) if slash else str(self.folders[name])


def _check_name(stage: Stage, earlier: list[ResolvedStage]) -> str:
    name = stage.name or stage.verb
    if not _STAGE_NAME.fullmatch(name):
        remedy = "use lowercase letters, digits, '-', '_' and '.'"
        raise SettingsError(f"'{name}' is not a valid name of a stage", remedy)
    if name in {other.name for other in earlier}:
        raise SettingsError(f"two stages are named '{name}'", "give one of them another name")
    return name


def _find_root(verb: str, name: str) -> type[config.Settings]:
    """Return the settings root of a stage's verb, which may have a flag."""
    stage_roots = {
        stage_verb: root
        for stage_verb, root in commands.settings_roots().items()
        if stage_verb != "pipeline" and hasattr(commands.import_verb(stage_verb), "run")
    }
    if verb not in stage_roots:
        remedy = choices.did_you_mean(verb, tuple(stage_roots))
        raise SettingsError(f"stage '{name}': no verb '{verb}' that a stage can run", remedy)
    return stage_roots[verb]


def merge_tables(
    stage: Stage, name: str, root: type[config.Settings], shared: config.Tables
) -> config.Tables:
    """Return the shared tables with the tables of a stage applied."""
    stage_tables = dict(stage.model_extra or {})
    for key in stage_tables:
        if key not in root.model_fields:
            remedy = choices.did_you_mean(key, tuple(root.model_fields))
            raise SettingsError(f"stage '{name}': {stage.verb} has no '{key}'", remedy)
    for key in ("output.folder", getattr(commands.import_verb(stage.verb), "OUTPUT", None) or ""):
        if key in dict(config.flatten(stage_tables)):
            problem = f"stage '{name}' sets {key}, which the pipeline sets"
            raise SettingsError(problem, f"remove {key} from the stage")
    location = f"the shared tables in stage '{name}'"
    return config.overlay_tables(shared, stage_tables, root, location)


def set_output(tables: config.Tables, key: str | None, folder: Path) -> None:
    """Set the output key of a verb to the stage's folder, and remove another `output.folder`."""
    output = tables.get("output")
    if isinstance(output, dict):
        tables["output"] = {name: item for name, item in output.items() if name != "folder"}
        if not tables["output"]:
            del tables["output"]
    if key is None:
        return
    *parents, last_key = key.split(".")
    table = tables
    for parent in parents:
        old = table.get(parent)
        table[parent] = dict(old) if isinstance(old, dict) else {}
        table = table[parent]
    table[last_key] = str(folder)
