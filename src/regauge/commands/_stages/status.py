"""Finds which stages of a pipeline are finished, stale or pending, and why. It writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from regauge import config
from regauge.system.errors import DataError, SettingsError
from regauge.system.json_files import DocumentShape

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.commands._stages import ResolvedStage

DONE = "done.json"


class DoneShape(DocumentShape):
    """The record of a finished stage."""

    sha256: str
    seconds: float
    settings: dict[str, Any]
    inputs: dict[str, str]


@dataclass(frozen=True)
class StageStatus:
    """The state of a stage."""

    state: Literal["finished", "stale", "pending"]
    """A stale stage was finished with other settings or inputs; a run refuses to start."""
    reason: str = ""
    """The reason why the stage is not finished."""
    record: dict[str, Any] = field(default_factory=dict)
    """Content of `done.json` if the stage is finished."""
    refusal: SettingsError | None = None
    """The error that a run raises for a stale stage."""

    @property
    def summary(self) -> str:
        """The state as text, with the seconds of a finished stage or the reason."""
        detail = f", {self.record['seconds']:.1f} s" if self.record else f": {self.reason}"
        return self.state + detail


def inspect_stages(stages: list[ResolvedStage]) -> dict[str, StageStatus]:
    """Return the status of every stage by name."""
    statuses: dict[str, StageStatus] = {}
    hashes: dict[str, str] = {}
    for stage in stages:
        identity = stage.compute_identity(hashes)
        hashes[stage.name] = identity["sha256"]
        statuses[stage.name] = _inspect_stage(stage, identity, statuses)
    return statuses


def _inspect_stage(
    stage: ResolvedStage, identity: dict[str, Any], earlier: dict[str, StageStatus]
) -> StageStatus:
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
    if before.get("sha256") != identity["sha256"]:
        reason = _describe_change(before, identity, earlier)
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
    """Return the record of a finished stage; None if it is damaged or has another format."""
    try:
        return config.find_document(path, "run the stage again", DoneShape)
    except DataError:
        return None


def _describe_change(
    before: dict[str, Any], now: dict[str, Any], earlier: dict[str, StageStatus]
) -> str:
    """Describe the first difference between two identities of a stage."""
    old, new = (dict(config.flatten(side.get("settings", {}))) for side in (before, now))
    for key in sorted({*old, *new}):
        if old.get(key) != new.get(key):
            return f"'{key}' has changed from {old.get(key)!r} to {new.get(key)!r}"
    inputs = before.get("inputs", {})
    changed = [name for name, sha256 in now["inputs"].items() if inputs.get(name) != sha256]
    if not changed:
        return "its verb has changed"
    state = "is stale" if earlier[changed[0]].state == "stale" else "has changed"
    return f"its input '{changed[0]}' {state}"
