"""Stages: the pointer of each stage, promotion, rollback and the log of both.

The pointer is the newest entry of the log. An entry is written in this order:

1. The entry of the pointer is written to the log, if a killed command did not.
2. The pointer is replaced, if it has not changed since it was read. This is the promotion.
3. The new entry is written to the log.

So a reader sees one version at any moment, and no promotion is lost.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from regauge.registry.registered_version import list_versions, read_version
from regauge.registry.registry_documents import (
    DEFAULT_STAGE,
    KNOWN_STAGES,
    LOG,
    MODELS,
    STAGES,
    Action,
    StageEntryShape,
    build_unknown_stage_error,
    check_name,
    check_stage,
    entry_key,
    find_user,
    format_document,
    format_time,
    join_key,
    parse_document,
    parse_time,
    stage_key,
)
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError, SettingsError, TransientError

if TYPE_CHECKING:
    from regauge.registry.registered_version import RegisteredVersion
    from regauge.registry.registry_storage import RegistryStorage


class StageEntry(NamedTuple):
    """An entry of the log of a stage."""

    document: dict[str, Any]
    """The content of the entry."""
    content: bytes
    """Its bytes, which the pointer and the log share."""
    token: str = ""
    """The token of the pointer, to replace it."""
    is_new: bool = False
    """Whether this call has written it."""

    @property
    def version(self) -> int:
        """The version that the stage points to."""
        return int(self.document["version"])

    @property
    def number(self) -> int:
        """The number of the entry, from 1."""
        return int(self.document["number"])

    @property
    def time(self) -> dt.datetime:
        """When it was written."""
        return parse_time(self.document["at"])

    def summarize(self) -> dict[str, Any]:
        """Return the entry as one row of a table."""
        names = ("stage", "number", "at", "action", "previous_version", "version", "by", "why")
        return {name: self.document[name] for name in names}


def promote(
    storage: RegistryStorage,
    name: str,
    version: int,
    stage: str = DEFAULT_STAGE,
    *,
    why: str,
    expected_version: int | None = None,
    create_stage: bool = False,
) -> StageEntry:
    """Point a stage to a version; see `Registry.promote`."""
    _check_reason(why)
    current = find_pointer(storage, name, check_stage(stage))
    known = sorted({*KNOWN_STAGES, *list_stages(storage, name)})
    if current is None and stage not in known and not create_stage:
        remedy = f"{did_you_mean(stage, known)} (or add --create-stage)"
        raise SettingsError(f"'{name}' has no stage '{stage}'", remedy)
    target = read_version(storage, name, version)
    previous = None if current is None else current.version
    if expected_version is not None and previous != expected_version:
        actual = "empty" if previous is None else f"version {previous}"
        problem = f"{name}@{stage} is {actual}, not version {expected_version}"
        raise DataError(problem, "compare the candidate with that version, then promote it")
    if current is not None and previous == version:
        return current
    target.check_files()
    return _move_stage(storage, target, stage, current, ("promote", why))


def roll_back(
    storage: RegistryStorage, name: str, stage: str = DEFAULT_STAGE, *, why: str
) -> StageEntry:
    """Point a stage to the version before; see `Registry.roll_back`."""
    _check_reason(why)
    current = _require_pointer(storage, name, check_stage(stage))
    earlier = _build_history(read_log(storage, name, stage))[:-1]
    if not earlier:
        problem = f"{name}@{stage} had no version before version {current.version}"
        raise SettingsError(problem, "promote another version instead")
    target = read_version(storage, name, earlier[-1])
    target.check_files()
    return _move_stage(storage, target, stage, current, ("rollback", why))


def list_stages(storage: RegistryStorage, name: str) -> list[str]:
    """Return the stages of a model that have a version."""
    names = storage.list_names(join_key(MODELS, check_name(name), STAGES))
    return [item.removesuffix(".json") for item in names if item.endswith(".json")]


def find_pointer(storage: RegistryStorage, name: str, stage: str) -> StageEntry | None:
    """Return the pointer of a stage; None if no version was ever promoted.

    Raises DataError if the pointer is damaged, or lost although the log has entries.
    """
    key = stage_key(check_name(name), stage)
    stored = storage.read_with_token(key)
    if stored is not None:
        return _parse_pointer(storage, name, stage, stored.content)._replace(token=stored.token)
    if remedy := _find_repair(storage, name, stage):
        raise DataError(f"{storage.locate(key)} is missing", remedy)
    return None


def read_pointer(storage: RegistryStorage, name: str, stage: str) -> StageEntry:
    """Return the pointer of a stage.

    Raises SettingsError for an unknown model or a stage without a version, and DataError if the
    pointer is damaged.
    """
    content = storage.read(stage_key(check_name(name), check_stage(stage)))
    if content is not None:  # one request, because servers poll it
        return _parse_pointer(storage, name, stage, content)
    return _require_pointer(storage, name, stage)


def _require_pointer(storage: RegistryStorage, name: str, stage: str) -> StageEntry:
    """Return the pointer of a stage with its token; raises the errors of `read_pointer`."""
    entry = find_pointer(storage, name, stage)
    if entry is None:
        list_versions(storage, name)  # raises SettingsError for an unknown model
        raise build_unknown_stage_error(stage, name, list_stages(storage, name))
    return entry


def read_log(storage: RegistryStorage, name: str, stage: str) -> list[StageEntry]:
    """Return all entries of a stage in order; the pointer is the last one.

    Raises DataError if an entry is damaged or missing.
    """
    pointer = find_pointer(storage, name, stage)
    if pointer is None:
        return []
    entries = []
    for number in range(1, pointer.number):
        key = entry_key(name, stage, number)
        content = storage.read(key)
        if content is None:
            problem = f"{storage.locate(key)} is missing"
            raise DataError(problem, "restore it from a copy of the registry")
        document = parse_document(content, storage.locate(key), StageEntryShape)
        entries.append(StageEntry(document, content))
    return [*entries, pointer]


def find_entry_at(entries: list[StageEntry], time_at: dt.datetime) -> StageEntry | None:
    """Return the entry that was current at a time; None before the first one."""
    earlier = [entry for entry in entries if entry.time <= time_at]
    return earlier[-1] if earlier else None


def _build_history(entries: list[StageEntry]) -> list[int]:
    """Return the versions of a stage without the ones that were rolled back, oldest first."""
    history: list[int] = []
    for entry in entries:
        if entry.document["action"] == "rollback":
            while history and history[-1] != entry.version:
                history.pop()
        if not history or history[-1] != entry.version:
            history.append(entry.version)
    return history


def _move_stage(
    storage: RegistryStorage,
    target: RegisteredVersion,
    stage: str,
    current: StageEntry | None,
    reason: tuple[Action, str],
) -> StageEntry:
    """Replace the pointer of a stage; raises TransientError if it has changed meanwhile."""
    name = target.model
    if current is not None:
        _write_log(storage, current)
    document = _build_entry(target, stage, current, reason)
    content = format_document(document)
    token = None if current is None else current.token
    if not storage.replace(stage_key(name, stage), content, token):
        winner = read_pointer(storage, name, stage)
        problem = (
            f"another command has changed {name}@{stage} meanwhile: it is version "
            f"{winner.version}, by {winner.document['by']}"
        )
        raise TransientError(problem, "compare with that version, then try again")
    entry = StageEntry(document, content, is_new=True)
    _write_log(storage, entry)
    return entry


def _build_entry(
    target: RegisteredVersion, stage: str, current: StageEntry | None, reason: tuple[Action, str]
) -> dict[str, Any]:
    """Return the next entry; its time is never before that of the entry before."""
    now = format_time(time.time())
    action, why = reason
    return {
        "id": uuid4().hex,
        "model": target.model,
        "stage": stage,
        "number": 1 if current is None else current.number + 1,
        "action": action,
        "version": target.number,
        "previous_version": None if current is None else current.version,
        "content_sha256": target.content_sha256,
        "at": now if current is None else max(now, str(current.document["at"])),
        "by": find_user(),
        "why": why,
        "previous_sha256": None if current is None else compute_sha256(current.content),
    }


def compute_sha256(content: bytes) -> str:
    """Return the hash that the next entry has of an entry."""
    return hashlib.sha256(content).hexdigest()


def _write_log(storage: RegistryStorage, entry: StageEntry) -> None:
    """Write an entry to the log, unless it is there already."""
    document = entry.document
    key = entry_key(document["model"], document["stage"], entry.number)
    if not storage.create(key, entry.content):
        problem = f"{storage.locate(key)} differs from the pointer of its stage"
        raise DataError(problem, "restore both from a copy of the registry")


def _parse_pointer(storage: RegistryStorage, name: str, stage: str, content: bytes) -> StageEntry:
    """Return the pointer of a stage; the remedy for a damaged one names its copy in the log."""
    location = storage.locate(stage_key(name, stage))
    try:
        document = parse_document(content, location, StageEntryShape)
    except DataError as error:
        remedy = _find_repair(storage, name, stage) or error.remedy
        raise DataError(error.problem, remedy) from None
    return StageEntry(document, content)


def _find_repair(storage: RegistryStorage, name: str, stage: str) -> str | None:
    """Return the remedy for a lost pointer: its copy in the log; None if the log is empty."""
    folder = join_key(MODELS, name, LOG, stage)
    entries = storage.list_names(folder)
    if not entries:
        return None
    source = storage.locate(join_key(folder, entries[-1]))
    return f"copy {source} to {storage.locate(stage_key(name, stage))}"


def _check_reason(why: str) -> None:
    """Raise SettingsError if a change of a stage has no reason."""
    if not why.strip():
        raise SettingsError("the change has no reason", "write one: --why TEXT")
