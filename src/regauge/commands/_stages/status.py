"""Finds which pipeline stages are finished, stale or pending, and plans them; writes nothing."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regauge import commands, config
from regauge.commands._parts.default_tables import complete_tables
from regauge.config.output_files import DONE
from regauge.data.input_hashes import SHOWN_DIGITS, list_changes, list_settings_changes
from regauge.system.errors import DataError, RegaugeError, SettingsError
from regauge.system.json_files import DocumentShape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.commands._stages import ResolvedStage
    from regauge.commands._stages.repetition import Repetition

DatasetRows = dict[str, Any]
"""Dataset folder -> row layouts; see `data/unprepared.py`."""


class DoneShape(DocumentShape):
    """A finished stage's record."""

    sha256: str
    seconds: float
    settings: dict[str, Any]
    inputs: dict[str, str]


@dataclass(frozen=True)
class StageStatus:
    state: Literal["finished", "stale", "pending"]
    """A stale stage was finished with other settings or inputs; a run refuses to start."""
    reason: str = ""
    """Why the stage is not finished."""
    record: dict[str, Any] = field(default_factory=dict)
    """`done.json` content if the stage is finished."""
    refusal: SettingsError | None = None
    """Error raised by a run for a stale stage."""

    @property
    def summary(self) -> str:
        """The state as text, with the seconds of a finished stage or the reason."""
        detail = f", {self.record['seconds']:.1f} s" if self.record else f": {self.reason}"
        return self.state + detail


def inspect_stages(stages: list[ResolvedStage]) -> dict[str, StageStatus]:
    """Return stage name -> status."""
    statuses: dict[str, StageStatus] = {}
    for stage in stages:
        statuses[stage.name] = _inspect_stage(stage, statuses)
    return statuses


def explain_stage(
    stage: ResolvedStage, status: StageStatus, repetition: Repetition | None
) -> dict[str, Any]:
    """Return a stage's state, and every input changed since it was last finished."""
    row: dict[str, Any] = {"name": stage.name, "state": status.state}
    if repetition is None:
        why = "nothing has changed" if status.state == "finished" else status.reason
        return row | {"why": why}
    row["hash"] = stage.sha256[:SHOWN_DIGITS]
    if status.state == "finished":
        return row | {"why": _describe_reuse(stage, repetition)}
    before = _find_last_identity(stage, repetition)
    if status.state == "stale" or before is None or before.get("sha256") == stage.sha256:
        return row | {"why": status.reason}
    return row | {"why": "; ".join(list_changes(before, stage.identity)) or status.reason}


def _inspect_stage(stage: ResolvedStage, earlier: dict[str, StageStatus]) -> StageStatus:
    stale_input = next((name for name in stage.inputs if earlier[name].state == "stale"), None)
    remedy = f"delete {stage.folder} to run it again"
    path = stage.folder / DONE
    if not path.exists():
        is_started = stage.folder.is_dir() and any(stage.folder.iterdir())
        reason = "started, but not finished" if is_started else "not run yet"
        return StageStatus(
            "pending", f"its input '{stale_input}' is stale" if stale_input else reason
        )
    before = _read_done(path)
    if before is None:
        problem = f"{path} cannot be read"
        return StageStatus("stale", problem, refusal=SettingsError(problem, remedy))
    if before["sha256"] != stage.sha256:
        reason = _describe_change(before, stage.identity, stale_input)
        problem = f"stage '{stage.name}' is finished, but {reason}"
        refusal = SettingsError(problem, f"set another output.folder, or {remedy}")
        return StageStatus("stale", reason, refusal=refusal)
    missing = next((name for name in stage.inputs if earlier[name].state != "finished"), None)
    if missing:
        problem = f"stage '{stage.name}' is finished, but its input '{missing}' is not"
        state = "stale" if missing == stale_input else "not finished"
        reason = f"its input '{missing}' is {state}"
        return StageStatus("stale", reason, refusal=SettingsError(problem, remedy))
    return StageStatus("finished", record=before)


def _read_done(path: Path) -> dict[str, Any] | None:
    """Return a finished stage's record; None if it is damaged or in another format."""
    try:
        return config.find_document(path, "run the stage again", DoneShape)
    except DataError:
        return None


def _describe_change(before: dict[str, Any], now: dict[str, Any], stale_input: str | None) -> str:
    if changes := list_settings_changes(before, now):
        return changes[0]
    changed = [name for name in now["inputs"] if before["inputs"].get(name) != now["inputs"][name]]
    if not changed:
        return "its verb has changed"
    return f"its input '{changed[0]}' {'is stale' if stale_input else 'has changed'}"


def _describe_reuse(stage: ResolvedStage, repetition: Repetition) -> str:
    for entry in repetition.rounds:
        if (item := entry.find_stage(stage.name, stage.sha256)) and not item.is_reused:
            return f"nothing has changed since round {entry.number}"
    return "nothing has changed"


def _find_last_identity(stage: ResolvedStage, repetition: Repetition) -> dict[str, Any] | None:
    for entry in reversed(repetition.rounds):
        for item in entry.stages:
            if item.name == stage.name:
                return _read_done(Path(item.folder) / DONE)
    return None


def describe_datasets(stages: list[ResolvedStage], shared: config.Tables) -> DatasetRows:
    """Return the row layouts of datasets in the shared tables and of those prepared by stages."""
    from regauge.data import unprepared

    dataset_rows: DatasetRows = {}
    with suppress(SettingsError):  # a stage's tables may complete the shared ones
        dataset_rows |= unprepared.describe_datasets(complete_tables(shared))
    for stage in stages:
        list_datasets = getattr(commands.import_verb(stage.verb), "list_datasets", None)
        if list_datasets is not None:
            dataset_rows |= list_datasets(stage.settings)
    return dataset_rows


def make_plan(
    stage: ResolvedStage, statuses: Mapping[str, StageStatus], dataset_rows: DatasetRows
) -> dict[str, Any]:
    """Return the dry run of a stage's verb.

    If it depends on stale or unfinished inputs, the plan only has their names.
    """
    plan = getattr(commands.import_verb(stage.verb), "plan", None)
    if plan is None:
        return {}
    states = {name: statuses[name].state for name in stage.inputs}
    if stale := [name for name, state in states.items() if state == "stale"]:
        return {"depends_on": ", ".join(stale)}
    needs_rows = "dataset_rows" in inspect.signature(plan).parameters
    try:
        return dict(plan(stage.settings, **({"dataset_rows": dataset_rows} if needs_rows else {})))
    except RegaugeError as error:
        unfinished = [name for name, state in states.items() if state != "finished"]
        if not unfinished:
            error.add_location(f"stage '{stage.name}'")
            raise
        return {"depends_on": ", ".join(unfinished)}
