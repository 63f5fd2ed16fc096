"""Model versions: registration, reading, and file checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from regauge.registry.documents import (
    FILES,
    MODELS,
    VERSION_FILE,
    VERSIONS,
    VersionShape,
    check_name,
    join_key,
    read_document,
    version_key,
)
from regauge.registry.model_files import find_difference
from regauge.registry.storage import FileHash, open_storage
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from regauge.registry.storage import RegistryStorage


@dataclass(frozen=True)
class RegisteredVersion:
    """A model version in a registry."""

    storage: RegistryStorage
    document: dict[str, Any]
    """`version.json` content."""
    is_new: bool = False
    """Whether this call registered it."""

    @property
    def model(self) -> str:
        return str(self.document["model"])

    @property
    def number(self) -> int:
        """Version number, from 1."""
        return int(self.document["version"])

    @property
    def kind(self) -> Literal["artifact", "model"]:
        """Whether the version is an exported artifact or a model folder."""
        kind: Literal["artifact", "model"] = self.document["kind"]
        return kind

    @property
    def content_sha256(self) -> str:
        """The hash reported by `predict` and a server for this model."""
        return str(self.document["content_sha256"])

    @property
    def reference(self) -> str:
        """The reference for `serve`, `predict` and `load`, such as `registry/qa@3`."""
        return f"{self.storage.address}/{self.model}@{self.number}"

    @property
    def hashes(self) -> dict[str, FileHash]:
        """Path in the model folder -> file hash."""
        return {name: FileHash(**item) for name, item in self.document["files"].items()}

    @property
    def file_storage(self) -> tuple[RegistryStorage, str]:
        """The storage with the model files, and the key of their folder in it."""
        location = self.document.get("location")
        if location is not None:
            return open_storage(location), ""
        return self.storage, version_key(self.model, self.number, FILES)

    @property
    def folder(self) -> str:
        """The address of the model folder."""
        storage, key = self.file_storage
        return storage.locate(key)

    def check_files(self) -> None:
        """Raise DataError if a file is missing or has changed since registration."""
        if damage := find_difference(*self.file_storage, self.hashes):
            problem = f"version {self.number} of '{self.model}' is corrupted: {damage}"
            raise DataError(problem, "register the artifact again, or restore that file")

    def summarize(self) -> dict[str, Any]:
        """Return the version as one table row."""
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


def list_version_numbers(storage: RegistryStorage, name: str) -> list[int]:
    """Return a model's version numbers, including unfinished registrations."""
    names = storage.list_names(join_key(MODELS, check_name(name), VERSIONS))
    return sorted(int(number) for number in names if number.isdigit())


def list_versions(storage: RegistryStorage, name: str) -> list[RegisteredVersion]:
    """Return a model's versions in order; raises SettingsError for an unknown model."""
    known = [*scan_versions(storage, name)][::-1]
    if not known:
        models = storage.list_names(MODELS)
        problem = f"the registry {storage.address} has no model '{name}'"
        raise SettingsError(problem, did_you_mean(name, models))
    return known


def scan_versions(storage: RegistryStorage, name: str) -> Iterator[RegisteredVersion]:
    """Yield a model's versions, newest first; empty for an unknown model."""
    for number in reversed(list_version_numbers(storage, name)):
        if (version := find_version(storage, name, number)) is not None:
            yield version


def find_version(storage: RegistryStorage, name: str, number: int) -> RegisteredVersion | None:
    """Return a version, if it exists. Raises DataError if the document is damaged."""
    key = version_key(check_name(name), number, VERSION_FILE)
    document = read_document(storage, key, VersionShape)
    return None if document is None else RegisteredVersion(storage, document)


def read_version(storage: RegistryStorage, name: str, number: int) -> RegisteredVersion:
    """Return a version; raises SettingsError if it does not exist."""
    version = find_version(storage, name, number)
    if version is None:
        numbers = [str(item.number) for item in list_versions(storage, name)]
        problem = f"'{name}' has no version {number}"
        raise SettingsError(problem, f"name one of: {', '.join(numbers)}")
    return version


def select_content(versions: Iterable[RegisteredVersion], sha256: str) -> RegisteredVersion | None:
    """Return the first version with this content, if any."""
    return next((version for version in versions if version.content_sha256 == sha256), None)
