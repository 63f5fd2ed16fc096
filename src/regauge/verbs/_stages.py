"""What a pipeline is made of: stages with resolved settings, and the record of a finished one.

Nothing here runs a verb. A value that starts with `@name` stands for the output folder of the
stage of that name; `@@` is a plain `@`.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from regauge import choices, config, verbs
from regauge.errors import SettingsError
from regauge.verbs._stage_status import DONE

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


class Stage(config.Settings):
    """One verb of a pipeline; any further table is laid over the shared one of that name."""

    model_config = ConfigDict(extra="allow")

    verb: str
    """The verb that this stage runs, with its flag where that asks for other tables."""
    name: str | None = None
    """Name of the stage and of its folder; `@name` in a later stage is that folder. The verb's
    name when left out."""


@dataclass(frozen=True)
class Ready:
    """A stage that can start: what it runs, where, on which settings, after which others."""

    number: int
    name: str
    verb: str
    folder: Path
    settings: config.Settings
    inputs: tuple[str, ...]

    def identity(self, made: dict[str, str]) -> dict[str, Any]:
        """Return what makes this stage's result what it is; `made` has the inputs' hashes."""
        document = {
            "verb": self.verb,
            "settings": config.dump(self.settings),
            "inputs": {name: made[name] for name in self.inputs},
        }
        text = json.dumps(document, sort_keys=True)
        return {**document, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def resolve(stages: tuple[Stage, ...], shared: config.Tables, folder: Path) -> list[Ready]:
    """Return every stage with its settings built, or raise SettingsError for the first fault.

    Assignments of the command line are part of `shared` and of the stages already.
    """
    ready: list[Ready] = []
    for number, stage in enumerate(stages, start=1):
        name = _checked_name(stage, ready)
        root = _root(stage.verb, name)
        place = folder / f"{number}-{name}"
        tables = _tables(stage, name, root, shared)
        output = getattr(verbs.module(stage.verb), "OUTPUT", None)
        _set_output(tables, output, place)
        references = _References(name, {earlier.name: earlier.folder for earlier in ready})
        resolved = {
            key: references.replace(value) if key in root.model_fields else value
            for key, value in tables.items()
        }
        settings = config.build(root, resolved, verbs.tables(), f"stage '{name}'")
        inputs = tuple(sorted(references.used))
        ready.append(Ready(number, name, stage.verb, place, settings, inputs))
    return ready


def mark(stage: Ready, made: dict[str, str], outcome: dict[str, Any]) -> str:
    """Record that a stage finished, and return the hash that later stages know it by."""
    identity = stage.identity(made)
    stage.folder.mkdir(parents=True, exist_ok=True)
    config.save(stage.folder / DONE, {**identity, **outcome})
    return str(identity["sha256"])


class _References:
    """Puts folders of earlier stages in the place of `@name`, and remembers which it used."""

    def __init__(self, stage: str, folders: dict[str, Path]) -> None:
        self.stage = stage
        self.folders = folders
        self.used: set[str] = set()

    def replace(self, value: Any) -> Any:
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
                else "the first stage has no earlier one; write @@ for a plain @"
            )
            raise SettingsError(
                f"stage '{self.stage}': '{reference}' names no earlier stage", remedy
            )
        self.used.add(name)
        return str(self.folders[name] / rest) if slash else str(self.folders[name])


def _checked_name(stage: Stage, earlier: list[Ready]) -> str:
    name = stage.name or stage.verb
    if not _NAME.fullmatch(name):
        remedy = "use small letters, digits, '-', '_' and '.'"
        raise SettingsError(f"'{name}' cannot name a stage", remedy)
    if name in {other.name for other in earlier}:
        raise SettingsError(f"two stages are named '{name}'", "give one of them another name")
    return name


def _root(verb: str, name: str) -> type[config.Settings]:
    """Return the settings root of a verb, or of a verb with a flag, that can be a stage."""
    known = {
        other: root
        for other, root in verbs.roots().items()
        if other != "pipeline" and hasattr(verbs.module(other), "run")
    }
    if verb not in known:
        remedy = choices.did_you_mean(verb, tuple(known))
        raise SettingsError(f"stage '{name}': no verb '{verb}' that a stage can run", remedy)
    return known[verb]


def _tables(
    stage: Stage, name: str, root: type[config.Settings], shared: config.Tables
) -> config.Tables:
    own = dict(stage.model_extra or {})
    for key in own:
        if key not in root.model_fields:
            remedy = choices.did_you_mean(key, tuple(root.model_fields))
            raise SettingsError(f"stage '{name}': {stage.verb} has no '{key}'", remedy)
    for key in ("output.folder", getattr(verbs.module(stage.verb), "OUTPUT", None) or ""):
        if key in _flat(own):
            raise SettingsError(
                f"stage '{name}' sets {key}, which the pipeline sets", f"remove {key} there"
            )
    return config.merge(shared, own)


def _set_output(tables: config.Tables, key: str | None, folder: Path) -> None:
    """Put the stage's folder under the verb's output key, and under no other."""
    output = tables.get("output")
    if isinstance(output, dict):
        tables["output"] = {name: item for name, item in output.items() if name != "folder"}
        if not tables["output"]:
            del tables["output"]
    if key is None:
        return
    *parents, last = key.split(".")
    place = tables
    for parent in parents:
        old = place.get(parent)
        place[parent] = dict(old) if isinstance(old, dict) else {}
        place = place[parent]
    place[last] = str(folder)


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {
        key: leaf
        for name, item in value.items()
        for key, leaf in _flat(item, f"{path}.{name}" if path else str(name)).items()
    }
