"""Registry documents: keys, shapes, reading and writing."""

from __future__ import annotations

import datetime as dt
import getpass
import os
import platform
import re
from typing import TYPE_CHECKING, Any, Final, Literal

from regauge import config
from regauge.registry.storage import FileHash
from regauge.system.errors import DataError, SettingsError
from regauge.system.files import format_json
from regauge.system.json_files import DocumentShape, check_shape, parse_object, seal

if TYPE_CHECKING:
    from regauge.registry.storage import RegistryStorage

REGISTRY_FILE, VERSION_FILE, CLAIM_FILE = "registry.json", "version.json", "claim.json"
MODELS, VERSIONS, FILES, STAGES, LOG = "models", "versions", "files", "stages", "log"
REGISTRY_KIND: Final = "regauge model registry"
DEFAULT_STAGE = "production"
KNOWN_STAGES = ("staging", "canary", DEFAULT_STAGE)
"""Stages that do not need `create_stage`."""
RESTORE = "restore it from a copy of the registry"
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
_STAGE = re.compile(r"[a-z][\w-]*")

Action = Literal["promote", "rollback"]


class RegistryShape(DocumentShape):
    format: int
    kind: Literal["regauge model registry"]
    created_at: str


class ClaimShape(DocumentShape):
    format: int
    content_sha256: str
    by: str
    at: float
    pid: int | None = None


class VersionShape(DocumentShape):
    format: int
    model: str
    version: int
    created_at: str
    created_by: str
    kind: Literal["artifact", "model"]
    content_sha256: str
    location: str | None = None
    files: dict[str, FileHash]
    parent: int | None = None
    lineage: dict[str, Any]
    parity: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    usd: float | None = None


class StageEntryShape(DocumentShape):
    """A pointer, which is also a log entry."""

    format: int
    model: str
    stage: str
    number: int
    action: Action
    version: int
    previous_version: int | None
    content_sha256: str
    at: str
    by: str
    why: str
    previous_sha256: str | None
    """SHA-256 of the previous entry's file; None for the first entry."""


def check_name(name: str) -> str:
    """Return a model name; raises SettingsError if it is invalid."""
    if not _NAME.fullmatch(name):
        remedy = "use letters, digits and . + - _"
        raise SettingsError(f"invalid model name '{name}'", remedy)
    return name


def check_stage(stage: str) -> str:
    """Return a stage name; raises SettingsError if it is invalid."""
    if not _STAGE.fullmatch(stage):
        remedy = "use lowercase letters, digits and - _, such as production"
        raise SettingsError(f"invalid stage '{stage}'", remedy)
    return stage


def join_key(*parts: str | int) -> str:
    return "/".join(map(str, parts))


def version_key(name: str, number: int, *parts: str) -> str:
    return join_key(MODELS, name, VERSIONS, number, *parts)


def stage_key(name: str, stage: str) -> str:
    return join_key(MODELS, name, STAGES, f"{stage}.json")


def entry_key(name: str, stage: str, number: int) -> str:
    return join_key(MODELS, name, LOG, stage, f"{number:08d}.json")


def format_document(document: dict[str, Any]) -> bytes:
    """Return a document's content with format and checksum."""
    sealed = seal({"format": config.FORMAT, **document})
    return (format_json(sealed, indent=1, sort_keys=True) + "\n").encode()


def parse_document(
    content: bytes, location: str, shape: type[DocumentShape], remedy: str = RESTORE
) -> dict[str, Any]:
    """Return a registry document.

    Raises DataError, with the remedy, if it is damaged, changed, or in another format or shape.
    """
    try:
        document = parse_object(content)
    except ValueError as error:
        raise DataError(f"{location} cannot be read: {error}", remedy) from None
    config.check_format(document, location, remedy)
    check_shape(document, location, remedy, shape)
    return document


def read_document(
    storage: RegistryStorage, key: str, shape: type[DocumentShape], remedy: str = RESTORE
) -> dict[str, Any] | None:
    """Return a registry document; None if it is missing; raises like `parse_document`."""
    content = storage.read(key)
    if content is None:
        return None
    return parse_document(content, storage.locate(key), shape, remedy)


def format_time(seconds: float) -> str:
    """Return seconds since 1970 as text in UTC."""
    time = dt.datetime.fromtimestamp(seconds, dt.UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time(text: str) -> dt.datetime:
    """Return a time, in UTC without an offset. Raises SettingsError for other text."""
    try:
        time = dt.datetime.fromisoformat(text)
    except ValueError:
        remedy = "write it as 2026-11-20T12:00, which is in UTC"
        raise SettingsError(f"'{text}' is not a time", remedy) from None
    return time if time.tzinfo is not None else time.replace(tzinfo=dt.UTC)


def find_user() -> str:
    """Return this process's user and machine, such as `ana@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a user database
        user = str(os.getuid())
    return f"{user}@{platform.node()}"
