"""Stages: the pointer, promotion, rollback and log of each stage.

The pointer is the newest log entry. An entry is written in this order:

1. The pointer's entry is written to the log, if a killed command did not.
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

from regauge.registry.documents import (
    LOG,
    MODELS,
    RESTORE,
    STAGES,
    Action,
    StageEntryShape,
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
from regauge.registry.registered_version import list_versions
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError, SettingsError, TransientError

if TYPE_CHECKING:
    from regauge.registry.registered_version import RegisteredVersion
    from regauge.registry.storage import RegistryStorage


class StageEntry(NamedTuple):
    """A stage's log entry."""

    document: dict[str, Any]
    content: bytes
    """Exact bytes, shared by the pointer and the log."""
    token: str = ""
    """Pointer token, needed to replace it."""
    is_new: bool = False
    """Whether this call wrote it."""

    @property
    def version(self) -> int:
        """The stage's version."""
        return int(self.document["version"])

    @property
    def number(self) -> int:
        """Entry number, from 1."""
        return int(self.document["number"])

    @property
    def time(self) -> dt.datetime:
        """When it was written."""
        return parse_time(self.document["at"])

    def summarize(self) -> dict[str, Any]:
        """Return the entry as one table row."""
        names = ("stage", "number", "at", "action", "previous_version", "version", "by", "why")
        return {name: self.document[name] for name in names}


def list_stages(storage: RegistryStorage, name: str) -> list[str]:
    """Return a model's stages with a version."""
    names = storage.list_names(join_key(MODELS, check_name(name), STAGES))
    return [item.removesuffix(".json") for item in names if item.endswith(".json")]


def find_pointer(storage: RegistryStorage, name: str, stage: str) -> StageEntry | None:
    """Return a stage's pointer; None if no version was ever promoted.

    Raises DataError if the pointer is damaged, or lost although the log has entries. The remedy
    names its copy in the log.
    """
    key = stage_key(check_name(name), stage)
    location = storage.locate(key)
    stored = storage.read_with_token(key)
    if stored is not None:
        try:
            document = parse_document(stored.content, location, StageEntryShape)
        except DataError as error:
            repair = _find_repair(storage, name, stage) or error.remedy
            raise DataError(error.problem, repair) from None
        return StageEntry(document, stored.content, stored.token)
    if remedy := _find_repair(storage, name, stage):
        raise DataError(f"{location} is missing", remedy)
    return None


def read_pointer(storage: RegistryStorage, name: str, stage: str) -> StageEntry:
    """Return a stage's pointer, with one request, because servers poll it.

    Raises SettingsError for an unknown model or a stage without a version, and DataError if the
    pointer is damaged.
    """
    entry = find_pointer(storage, name, check_stage(stage))
    if entry is not None:
        return entry
    list_versions(storage, name)  # raises SettingsError for an unknown model
    known = list_stages(storage, name)
    problem = f"no version of '{name}' is in stage '{stage}'"
    command = f"run: regauge models promote {name} VERSION --stage {stage} --why TEXT"
    raise SettingsError(problem, did_you_mean(stage, known) if known else command)


def read_log(storage: RegistryStorage, name: str, stage: str) -> list[StageEntry]:
    """Return all entries of a stage in order, ending with the pointer.

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
            raise DataError(problem, RESTORE)
        document = parse_document(content, storage.locate(key), StageEntryShape)
        entries.append(StageEntry(document, content))
    return [*entries, pointer]


def list_history(entries: list[StageEntry]) -> list[int]:
    """Return a stage's versions without rolled-back ones, oldest first."""
    history: list[int] = []
    for entry in entries:
        if entry.document["action"] == "rollback":
            while history and history[-1] != entry.version:
                history.pop()
        if not history or history[-1] != entry.version:
            history.append(entry.version)
    return history


def move_stage(
    target: RegisteredVersion,
    stage: str,
    current: StageEntry | None,
    reason: tuple[Action, str],
) -> StageEntry:
    """Replace a stage's pointer; raises TransientError if it has changed meanwhile."""
    storage, name = target.storage, target.model
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
    """Return the next entry; the time is never before the previous entry's."""
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
    """Return the hash of an entry as recorded in the next one."""
    return hashlib.sha256(content).hexdigest()


def _write_log(storage: RegistryStorage, entry: StageEntry) -> None:
    """Write an entry to the log, unless it is there already."""
    document = entry.document
    key = entry_key(document["model"], document["stage"], entry.number)
    if not storage.create(key, entry.content):
        problem = f"{storage.locate(key)} differs from the pointer of its stage"
        raise DataError(problem, "restore both from a copy of the registry")


def _find_repair(storage: RegistryStorage, name: str, stage: str) -> str | None:
    """Return the remedy for a lost pointer: the copy in the log; None if the log is empty."""
    folder = join_key(MODELS, name, LOG, stage)
    entries = storage.list_names(folder)
    if not entries:
        return None
    source = storage.locate(join_key(folder, entries[-1]))
    return f"copy {source} to {storage.locate(stage_key(name, stage))}"
