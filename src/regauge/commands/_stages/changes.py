"""Names the inputs of a stage that changed: settings, data, code, input stages, serving model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import config
from regauge.commands._stages.status import DONE, DoneShape
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from regauge.commands._stages import ResolvedStage
    from regauge.commands._stages.repetition import Repetition
    from regauge.commands._stages.status import StageStatus

MAX_LISTED = 5
"""Changes of one kind that are listed."""
SHOWN_DIGITS = 8


def explain_stage(
    stage: ResolvedStage, status: StageStatus, repetition: Repetition | None
) -> dict[str, Any]:
    """Return the state of a stage, and every input that has changed since it was last finished."""
    row: dict[str, Any] = {"name": stage.name, "state": status.state}
    identity = stage.fixed_identity
    if repetition is None or identity is None:
        why = "nothing has changed" if status.state == "finished" else status.reason
        return row | {"why": why}
    row["hash"] = identity["sha256"][:SHOWN_DIGITS]
    if status.state == "finished":
        return row | {"why": _describe_reuse(stage, repetition)}
    before = _find_last_identity(stage, repetition)
    if status.state == "stale" or before is None or before.get("sha256") == identity["sha256"]:
        return row | {"why": status.reason}
    return row | {"why": "; ".join(list_changes(before, identity)) or status.reason}


def list_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return one text for every input in which two identities of a stage differ."""
    changes = _compare_settings(before.get("settings", {}), now["settings"])
    for key in sorted({*before.get("data", {}), *now["data"]}):
        old, new = before.get("data", {}).get(key, {}), now["data"].get(key, {})
        changes += _compare_files(key, old, new)
    old_code = before.get("code", {})
    for name, value in now["code"].items():
        if old_code.get(name) != value:
            old = old_code.get(name, "none")
            changes.append(f"code {name} has changed from {_shorten(old)} to {_shorten(value)}")
    old_inputs = before.get("inputs", {})
    for name, sha256 in now["inputs"].items():
        if old_inputs.get(name) != sha256:
            hashes = f"{_shorten(old_inputs.get(name, 'none'))} to {_shorten(sha256)}"
            changes.append(f"input '{name}' has changed from {hashes}")
    if before.get("serving") != now["serving"]:
        versions = f"{before.get('serving') or 'none'} to {now['serving'] or 'none'}"
        changes.append(f"the serving version has changed from {versions}")
    if before.get("verb") != now["verb"]:
        changes.append(f"the verb has changed from {before.get('verb')} to {now['verb']}")
    return changes


def _describe_reuse(stage: ResolvedStage, repetition: Repetition) -> str:
    """Return the round in which a finished stage ran."""
    sha256 = str(stage.compute_identity({})["sha256"])
    for entry in repetition.rounds:
        if (item := entry.find_stage(stage.name, sha256)) and not item["is_reused"]:
            return f"nothing has changed since round {entry.number}"
    return "nothing has changed"


def _find_last_identity(stage: ResolvedStage, repetition: Repetition) -> dict[str, Any] | None:
    """Return the identity of a stage in the last round that finished it; None without one."""
    for entry in reversed(repetition.rounds):
        for item in entry.stages:
            if item["name"] == stage.name:
                try:
                    return config.find_document(Path(item["folder"]) / DONE, "run it", DoneShape)
                except DataError:
                    return None
    return None


def _compare_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    old, new = (dict(config.flatten(side)) for side in (before, now))
    return [
        f"'{key}' has changed from {old.get(key)!r} to {new.get(key)!r}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def _compare_files(key: str, before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the files of a source that are new, that have changed, or that are gone."""
    kinds = {
        "new": [name for name in now if name not in before],
        "changed": [name for name in now if name in before and before[name] != now[name]],
        "no longer read": [name for name in before if name not in now],
    }
    return [f"data {key}: {_join(names)} {state}" for state, names in kinds.items() if names]


def _join(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{more}"


def _shorten(value: str) -> str:
    return value[:SHOWN_DIGITS] if len(value) > 2 * SHOWN_DIGITS else value
