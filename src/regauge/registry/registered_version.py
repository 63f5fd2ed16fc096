"""Versions of a model: registration, reading, and the check of their files."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from regauge.registry.lineage import collect_lineage, find_figures
from regauge.registry.model_files import find_difference, inspect_model
from regauge.registry.registry_documents import (
    CLAIM_FILE,
    FILES,
    MODELS,
    VERSION_FILE,
    VERSIONS,
    VersionShape,
    check_name,
    find_user,
    format_document,
    format_time,
    join_key,
    read_document,
    version_key,
)
from regauge.registry.registry_storage import FileHash, open_storage
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError, SettingsError
from regauge.system.log import logger

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from regauge.registry.model_files import ModelFiles
    from regauge.registry.registry_storage import RegistryStorage

MAX_CLAIMS = 100
"""How often a registration tries the next number while others take it."""


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of a model in a registry."""

    storage: RegistryStorage
    """The storage of the registry."""
    document: dict[str, Any]
    """The content of `version.json`."""
    is_new: bool = False
    """Whether this call has registered it."""

    @property
    def model(self) -> str:
        """The name of the model."""
        return str(self.document["model"])

    @property
    def number(self) -> int:
        """The number of the version, from 1."""
        return int(self.document["version"])

    @property
    def kind(self) -> Literal["artifact", "model"]:
        """Whether the version is an exported artifact, or the folder of a model."""
        kind: Literal["artifact", "model"] = self.document["kind"]
        return kind

    @property
    def content_sha256(self) -> str:
        """The hash that `predict` and a server report for this model."""
        return str(self.document["content_sha256"])

    @property
    def reference(self) -> str:
        """The reference that `serve`, `predict` and `load` accept, such as `registry/qa@3`."""
        return f"{self.storage.address}/{self.model}@{self.number}"

    @property
    def hashes(self) -> dict[str, FileHash]:
        """Every file, by its path in the folder of the model."""
        items = self.document["files"].items()
        return {name: FileHash(item["bytes"], item["sha256"]) for name, item in items}

    @property
    def file_storage(self) -> tuple[RegistryStorage, str]:
        """The storage with the files of the model, and the key of their folder in it."""
        location = self.document.get("location")
        if location is not None:
            return open_storage(location), ""
        return self.storage, version_key(self.model, self.number, FILES)

    @property
    def folder(self) -> str:
        """The address of the folder of the model."""
        storage, key = self.file_storage
        return storage.locate(key)

    def find_damage(self) -> str | None:
        """Hash all files; return the first one that is missing or has changed, or None."""
        return find_difference(*self.file_storage, self.hashes)

    def check_files(self) -> None:
        """Raise DataError if a file is missing or has changed since the registration."""
        if damage := self.find_damage():
            problem = f"version {self.number} of '{self.model}' is corrupted: {damage}"
            raise DataError(problem, "register the artifact again, or restore that file")

    def summarize(self) -> dict[str, Any]:
        """Return the version as one row of a table."""
        lineage, parity = self.document["lineage"], self.document.get("parity") or {}
        return {
            "version": self.number,
            "created_at": self.document["created_at"],
            "run": lineage["checkpoint"].get("run_id"),
            "quality_loss": parity.get("quality_loss"),
            "usd": self.document.get("usd"),
            "parent": self.document.get("parent"),
            "sha256": self.content_sha256[:12],
        }


def register_version(
    storage: RegistryStorage,
    name: str,
    model: str | os.PathLike[str],
    *,
    run: str | os.PathLike[str] | None = None,
    parent: int | None = None,
    evaluation: Mapping[str, Any] | None = None,
    usd: float | None = None,
    by_reference: bool = False,
) -> RegisteredVersion:
    """Register an artifact, or the model of a run or of a folder; see `Registry.register`."""
    check_name(name)
    files = inspect_model(model)
    if (existing := find_content(storage, name, files.content_sha256)) is not None:
        logger.info("%s is version %d of '%s' already", model, existing.number, name)
        return existing
    if parent is not None:
        read_version(storage, name, parent)
    run_folder = None if run is None else Path(run).expanduser()
    figures = find_figures(files, run_folder)
    lineage = collect_lineage(files, run_folder)
    document = {
        "model": name,
        "created_by": find_user(),
        "kind": files.kind,
        "content_sha256": files.content_sha256,
        "files": {key: item._asdict() for key, item in sorted(files.hashes.items())},
        "lineage": lineage,
        "location": str(files.folder.resolve()) if by_reference else None,
        "parent": parent if parent is not None else _find_parent(storage, name, lineage),
        "parity": figures["parity"],
        "evaluation": dict(evaluation) if evaluation is not None else figures["evaluation"],
        "usd": usd if usd is not None else figures["usd"],
    }
    number = _claim_number(storage, name, files.content_sha256)
    if not by_reference:
        _upload_files(storage, name, number, files)
    document |= {"version": number, "created_at": format_time(time.time())}
    _commit(storage, name, number, document)
    return RegisteredVersion(storage, read_version(storage, name, number).document, is_new=True)


def list_version_numbers(storage: RegistryStorage, name: str) -> list[int]:
    """Return the numbers of the versions of a model, also of unfinished registrations."""
    names = storage.list_names(join_key(MODELS, check_name(name), VERSIONS))
    return sorted(int(number) for number in names if number.isdigit())


def list_versions(storage: RegistryStorage, name: str) -> list[RegisteredVersion]:
    """Return the versions of a model in order; raises SettingsError for an unknown model."""
    numbers = list_version_numbers(storage, name)
    versions = (find_version(storage, name, number) for number in numbers)
    known = [version for version in versions if version is not None]
    if not known:
        models = storage.list_names(MODELS)
        problem = f"the registry {storage.address} has no model '{name}'"
        raise SettingsError(problem, did_you_mean(name, models))
    return known


def find_version(storage: RegistryStorage, name: str, number: int) -> RegisteredVersion | None:
    """Return a version; None if there is none. Raises DataError if its document is damaged."""
    key = version_key(check_name(name), number, VERSION_FILE)
    document = read_document(storage, key, VersionShape)
    return None if document is None else RegisteredVersion(storage, document)


def read_version(storage: RegistryStorage, name: str, number: int) -> RegisteredVersion:
    """Return a version; raises SettingsError if there is none."""
    version = find_version(storage, name, number)
    if version is None:
        numbers = [str(item.number) for item in list_versions(storage, name)]
        problem = f"'{name}' has no version {number}"
        raise SettingsError(problem, f"name one of: {', '.join(numbers)}")
    return version


def find_content(storage: RegistryStorage, name: str, sha256: str) -> RegisteredVersion | None:
    """Return the newest version of a model with this content; None if there is none."""
    for number in reversed(list_version_numbers(storage, name)):
        version = find_version(storage, name, number)
        if version is not None and version.content_sha256 == sha256:
            return version
    return None


def _find_parent(storage: RegistryStorage, name: str, lineage: dict[str, Any]) -> int | None:
    """Return the version whose run a run started from; None if it is not in the registry."""
    start = lineage["checkpoint"].get("start")
    path = start.get("path") if isinstance(start, dict) else start
    if not isinstance(path, str):
        return None
    run = str(Path(path).expanduser().resolve())
    for number in reversed(list_version_numbers(storage, name)):
        version = find_version(storage, name, number)
        if version is not None and version.document["lineage"]["checkpoint"].get("run") == run:
            return number
    return None


def _claim_number(storage: RegistryStorage, name: str, sha256: str) -> int:
    """Reserve the next number; two registrations never have the same."""
    number = max(list_version_numbers(storage, name), default=0) + 1
    claim = {"id": uuid4().hex, "by": find_user(), "at": time.time(), "content_sha256": sha256}
    for candidate in range(number, number + MAX_CLAIMS):
        if storage.create(version_key(name, candidate, CLAIM_FILE), format_document(claim)):
            return candidate
    problem = f"other registrations took {MAX_CLAIMS} numbers of '{name}'"
    raise SettingsError(problem, "register it when they have ended")


def _upload_files(storage: RegistryStorage, name: str, number: int, files: ModelFiles) -> None:
    """Copy the files; raises DataError if one has changed since it was hashed."""
    prefix = version_key(name, number, FILES)
    for file in files.hashes:
        storage.upload(files.folder / file, f"{prefix}/{file}")
    if damage := find_difference(storage, prefix, files.hashes):
        raise DataError(f"the copy of {files.folder} is not whole: {damage}", "register it again")


def _commit(storage: RegistryStorage, name: str, number: int, document: dict[str, Any]) -> None:
    key = version_key(name, number, VERSION_FILE)
    if not storage.create(key, format_document(document)):
        raise DataError(f"{storage.locate(key)} exists already", "register the artifact again")
