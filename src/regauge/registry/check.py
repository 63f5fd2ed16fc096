"""Checks a registry: files, lineage, pointers and logs; names every difference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge import config
from regauge.registry.documents import (
    LOG,
    MODELS,
    entry_key,
    join_key,
    read_document,
    version_key,
)
from regauge.registry.model_files import ArtifactShape, compute_content_hash
from regauge.registry.registered_version import (
    RegisteredVersion,
    find_version,
    list_version_numbers,
    read_version,
)
from regauge.registry.stages import compute_sha256, list_stages, read_log
from regauge.system.errors import RegaugeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.registry.registry import Registry
    from regauge.registry.storage import RegistryStorage

Difference = tuple[str, str]
"""A problem and its remedy."""
REGISTER_AGAIN = "register the artifact again"


class RegistryFinding(NamedTuple):
    subject: str
    """Version or stage, such as `qa@3`."""
    problem: str
    remedy: str


@dataclass
class RegistryCheck:
    """Counts of checked parts, and the differences."""

    num_versions: int = 0
    num_files: int = 0
    num_entries: int = 0
    findings: list[RegistryFinding] = field(default_factory=list)

    def to_document(self) -> dict[str, Any]:
        return {
            "versions": self.num_versions,
            "files": self.num_files,
            "log_entries": self.num_entries,
            "problems": [finding._asdict() for finding in self.findings],
        }

    def add(self, subject: str, differences: Iterator[Difference]) -> None:
        """Add the differences in a version or stage, up to and including the first error."""
        try:
            for problem, remedy in differences:
                self.findings.append(RegistryFinding(subject, problem, remedy))
        except RegaugeError as error:
            self.findings.append(RegistryFinding(subject, error.problem, error.remedy))


def check_registry(
    registry: Registry, name: str | None = None, number: int | None = None
) -> RegistryCheck:
    """Hash all files in a registry, model or version; compare lineage, pointers and logs.

    Raises SettingsError for an unknown model or version.
    """
    storage, check = registry.storage, RegistryCheck()
    if name is not None:
        registry.check_model(name)
        if number is not None:
            read_version(storage, name, number)
    for model in registry.list_models() if name is None else [name]:
        for item in list_version_numbers(storage, model) if number is None else [number]:
            check.add(f"{model}@{item}", _check_version(storage, model, item, check))
        logs = storage.list_names(join_key(MODELS, model, LOG))
        for stage in sorted({*list_stages(storage, model), *logs}) if number is None else ():
            check.add(f"{model}@{stage}", _check_stage(storage, model, stage, check))
    return check


def _check_version(
    storage: RegistryStorage, model: str, number: int, check: RegistryCheck
) -> Iterator[Difference]:
    version = find_version(storage, model, number)
    if version is None:
        folder = storage.locate(version_key(model, number))
        remedy = f"{REGISTER_AGAIN}; {folder} may be removed"
        yield "its registration was not finished", remedy
        return
    check.num_versions += 1
    check.num_files += len(version.hashes)
    version.check_files()
    yield from _check_lineage(version)


def _check_lineage(version: RegisteredVersion) -> Iterator[Difference]:
    document, content_sha256 = version.document, compute_content_hash(version.hashes)
    if version.kind == "artifact":
        storage, folder = version.file_storage
        key = f"{folder}/{config.MANIFEST}" if folder else config.MANIFEST
        manifest = read_document(storage, key, ArtifactShape) or {"origin": {"sha256": None}}
        content_sha256 = document["files"].get(config.MANIFEST, {}).get("sha256")
        if manifest["origin"]["sha256"] != document["lineage"]["checkpoint"]["weights_sha256"]:
            yield "its lineage names other weights than its manifest", REGISTER_AGAIN
    if content_sha256 != version.content_sha256:
        yield "its content_sha256 is not that of its files", REGISTER_AGAIN
    parent = document.get("parent")
    if parent is not None and find_version(version.storage, version.model, parent) is None:
        yield f"its parent, version {parent}, is missing", REGISTER_AGAIN


def _check_stage(
    storage: RegistryStorage, name: str, stage: str, check: RegistryCheck
) -> Iterator[Difference]:
    entries = read_log(storage, name, stage)
    check.num_entries += len(entries)
    previous_sha256: str | None = None
    restore = "restore the log from a copy of the registry"
    for entry in entries:
        document, number = entry.document, entry.version
        location = storage.locate(entry_key(name, stage, entry.number))
        if document["previous_sha256"] != previous_sha256:
            yield f"{location} does not follow the entry before", restore
        version = find_version(storage, name, number)
        if version is None:
            remedy = "restore that version from a copy of the registry"
            yield f"{location} names version {number}, which is missing", remedy
        elif version.content_sha256 != document["content_sha256"]:
            yield f"{location} names other content for version {number}", restore
        previous_sha256 = compute_sha256(entry.content)
