"""Pipeline stages with resolved settings, and the record of a finished stage.

    <pipeline>/<number>-<name>                                        a stage
    <pipeline>/<number>-<name>/<first digits of the input hash>       a stage in a round

A value that starts with `@name` refers to the output folder of stage `name`; `@@` is a literal `@`.
This module does not run verbs.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from regauge import commands, config
from regauge.config.output_files import DONE
from regauge.supervision.nodes.topology import is_whole_node
from regauge.system import choices
from regauge.system.errors import SettingsError
from regauge.system.json_files import hash_document
from regauge.training.settings import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.commands._stages.repeating import RoundInputs

FOLDER_DIGITS = 12
_STAGE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
INDEX_VARIABLES = (
    "PET_NODE_RANK",
    "AWS_BATCH_JOB_NODE_INDEX",
    "JOB_COMPLETION_INDEX",
    "SLURM_NODEID",
)
"""Node number variables: torchrun, AWS Batch, Indexed Jobs, and `srun`."""


class Stage(config.Settings):
    """One verb in a pipeline; the other tables override shared tables with the same name."""

    model_config = ConfigDict(extra="allow")

    verb: str
    """Verb to run, with a flag if the flag reads other tables."""
    name: str | None = None
    """Stage and folder name; `@name` in a later stage is that folder. Default: the verb."""


@dataclass(frozen=True)
class ResolvedStage:
    """A stage with resolved settings, folder and input stage names."""

    number: int
    name: str
    verb: str
    folder: Path
    settings: config.Settings
    inputs: tuple[str, ...]
    identity: dict[str, Any]
    """Everything determining the stage's result, with a SHA-256."""

    @property
    def sha256(self) -> str:
        """The identity hash, which is part of later stages' identities."""
        return str(self.identity["sha256"])


def resolve_stages(
    stages: tuple[Stage, ...],
    shared: config.Tables,
    folder: Path,
    round_inputs: RoundInputs | None = None,
) -> list[ResolvedStage]:
    """Build every stage's settings; raises SettingsError for the first invalid stage.

    `shared` and the stages already include command line overrides. Stages in a repeating pipeline
    have `round_inputs`.
    """
    resolved: list[ResolvedStage] = []
    for number, stage in enumerate(stages, start=1):
        name, root = _check_name(stage, resolved), _find_root(stage)
        tables = root.complete_tables(_merge_tables(stage, name, root, shared))
        tables = {key: table for key, table in tables.items() if key in root.model_fields}
        tables = _add_earlier_stages(stage.verb, tables, [earlier.name for earlier in resolved])
        filled = tables if round_inputs is None else round_inputs.fill(tables, name, root)
        references = References(name, {earlier.name: earlier.folder for earlier in resolved})
        stage_folder = folder / f"{number}-{name}"
        settings = _build(stage, root, filled, stage_folder, references)
        inputs = tuple(sorted(references.used))
        hashes = {item.name: item.sha256 for item in resolved if item.name in inputs}
        if round_inputs is None:
            identity = seal_identity(
                {"verb": stage.verb, "settings": config.dump(settings), "inputs": hashes}
            )
        else:
            identity = round_inputs.identify(stage, tables, settings, hashes)
            stage_folder /= identity["sha256"][:FOLDER_DIGITS]
            settings = _build(stage, root, filled, stage_folder, references)
        resolved.append(
            ResolvedStage(number, name, stage.verb, stage_folder, settings, inputs, identity)
        )
    return resolved


def seal_identity(document: dict[str, Any]) -> dict[str, Any]:
    """Return everything determining a stage's result, with a SHA-256."""
    return {**document, "sha256": hash_document(document)}


def save_outcome(stage: ResolvedStage, outcome: dict[str, Any]) -> None:
    """Record a finished stage."""
    stage.folder.mkdir(parents=True, exist_ok=True)
    config.save(stage.folder / DONE, {**stage.identity, **outcome})


def find_output(verb: str) -> str:
    """Return a verb's output folder key, or an empty string."""
    return getattr(commands.import_verb(verb), "OUTPUT", None) or ""


class References:
    """Replaces `@name` with an earlier stage's folder, and collects the used names."""

    def __init__(self, stage: str, folders: dict[str, Path]) -> None:
        self.stage = stage
        self.folders = folders
        self.used: set[str] = set()

    def replace(self, value: Any) -> Any:
        """Return a value with references replaced by folders."""
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
                f"stage '{self.stage}': '{reference}' does not name an earlier stage", remedy
            )
        self.used.add(name)
        return str(self.folders[name] / rest) if slash else str(self.folders[name])


def _check_name(stage: Stage, earlier: list[ResolvedStage]) -> str:
    name = stage.name or stage.verb
    if not _STAGE_NAME.fullmatch(name):
        remedy = "use lowercase letters, digits, '-', '_' and '.'"
        raise SettingsError(f"'{name}' is not a valid stage name", remedy)
    if name in {other.name for other in earlier}:
        raise SettingsError(f"two stages are named '{name}'", "give one of them another name")
    return name


def _find_root(stage: Stage) -> type[config.Settings]:
    verb, name = stage.verb, stage.name or stage.verb
    stage_roots = {
        stage_verb: root
        for stage_verb, root in commands.settings_roots().items()
        if stage_verb != "pipeline" and hasattr(commands.import_verb(stage_verb), "run")
    }
    if verb not in stage_roots:
        remedy = choices.did_you_mean(verb, tuple(stage_roots))
        raise SettingsError(f"stage '{name}': a stage cannot run '{verb}'", remedy)
    return stage_roots[verb]


def _merge_tables(
    stage: Stage, name: str, root: type[config.Settings], shared: config.Tables
) -> config.Tables:
    stage_tables = dict(stage.model_extra or {})
    for key in stage_tables:
        if key not in root.model_fields:
            remedy = choices.did_you_mean(key, tuple(root.model_fields))
            raise SettingsError(f"stage '{name}': {stage.verb} has no '{key}'", remedy)
    for key in ("output.folder", find_output(stage.verb)):
        if key in dict(config.flatten(stage_tables)):
            problem = f"stage '{name}' sets {key}, which the pipeline sets"
            raise SettingsError(problem, f"remove {key} from the stage")
    location = f"the shared tables in stage '{name}'"
    return config.overlay_tables(shared, stage_tables, root, location)


def _add_earlier_stages(verb: str, tables: config.Tables, names: list[str]) -> config.Tables:
    """Return the tables with the verb's `EARLIER_STAGES` set, unless it is or none is earlier."""
    table, _, key = getattr(commands.import_verb(verb), "EARLIER_STAGES", "").partition(".")
    if not key or not names or tables.get(table, {}).get(key):
        return tables
    return config.merge(tables, {table: {key: tuple(f"@{name}" for name in names)}})


def _build(
    stage: Stage,
    root: type[config.Settings],
    tables: config.Tables,
    folder: Path,
    references: References,
) -> config.Settings:
    output = tables.get("output")
    if isinstance(output, dict):
        tables = {**tables, "output": {key: output[key] for key in output if key != "folder"}}
        if not tables["output"]:
            del tables["output"]
    overlay: Any = str(folder)
    for part in reversed(find_output(stage.verb).split(".")):
        overlay = {part: overlay} if part else {}
    complete = references.replace(config.merge(tables, overlay))
    return config.build(root, complete, commands.table_names(), f"stage '{references.stage}'")


def is_follower(stage: ResolvedStage, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a node in a training stage other than the first.

    Each node runs `regauge pipeline FILE --until STAGE`; only the first one writes the records.
    """
    settings = stage.settings
    if not isinstance(settings, TrainSettings):
        return False
    nodes = settings.execution.nodes
    return is_whole_node(nodes, environment) and read_node_index(environment) > 0


def read_node_index(environment: Mapping[str, str]) -> int:
    """Return this node's number, from the first variable in the environment; 0 without one."""
    values = [environment[name] for name in INDEX_VARIABLES if name in environment]
    return int(values[0]) if values and values[0].isdigit() else 0
