"""Checks a registry: files, lineage, pointers and logs; names everything that differs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from regauge import config
from regauge.registry.model_files import ArtifactShape, compute_content_hash
from regauge.registry.registered_version import (
    RegisteredVersion,
    find_version,
    list_version_numbers,
    read_version,
)
from regauge.registry.registry_documents import (
    LOG,
    MODELS,
    entry_key,
    join_key,
    parse_document,
    version_key,
)
from regauge.registry.stages import StageEntry, compute_sha256, list_stages, read_log
from regauge.system.errors import RegaugeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.registry.registry import Registry
    from regauge.registry.registry_storage import RegistryStorage


class RegistryFinding(NamedTuple):
    """A difference in a registry."""

    subject: str
    """The version or stage, such as `qa@3`."""
    problem: str
    remedy: str


class CheckSummary(NamedTuple):
    """The number of checked parts of a registry, and the differences."""

    num_versions: int
    num_files: int
    num_entries: int
    findings: list[RegistryFinding]

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document of the summary."""
        return {
            "versions": self.num_versions,
            "files": self.num_files,
            "log_entries": self.num_entries,
            "problems": [finding._asdict() for finding in self.findings],
        }


def check_registry(
    registry: Registry, name: str | None = None, number: int | None = None
) -> CheckSummary:
    """Hash all files of a registry, of a model or of a version; compare lineage, pointers and logs.

    Raises SettingsError for an unknown model or version.
    """
    if name is not None:
        registry.check_model(name)
    if name is not None and number is not None:
        read_version(registry.storage, name, number)
    checker = _Checker(registry.storage)
    for model in registry.list_models() if name is None else [name]:
        numbers = list_version_numbers(registry.storage, model)
        for item in numbers if number is None else [number]:
            checker.check_version(model, item)
        for stage in _list_all_stages(registry.storage, model) if number is None else ():
            checker.check_stage(model, stage)
    return checker.summary


class _Checker:
    """The checks of a registry, with their findings so far."""

    def __init__(self, storage: RegistryStorage) -> None:
        self._storage = storage
        self._findings: list[RegistryFinding] = []
        self._num_versions = self._num_files = self._num_entries = 0

    @property
    def summary(self) -> CheckSummary:
        """The result of the checks so far."""
        counts = self._num_versions, self._num_files, self._num_entries
        return CheckSummary(*counts, self._findings)

    def check_version(self, model: str, number: int) -> None:
        """Check the document, the files and the lineage of a version."""
        subject = f"{model}@{number}"
        try:
            version = find_version(self._storage, model, number)
            if version is None:
                folder = self._storage.locate(version_key(model, number))
                problem = "its registration was not finished"
                remedy = f"register the artifact again; {folder} may be removed"
                self._findings.append(RegistryFinding(subject, problem, remedy))
                return
            self._num_versions += 1
            self._num_files += len(version.hashes)
            version.check_files()
            for finding in _check_lineage(version, subject):
                self._findings.append(finding)
        except RegaugeError as error:
            self._findings.append(RegistryFinding(subject, error.problem, error.remedy))

    def check_stage(self, model: str, stage: str) -> None:
        """Check the pointer and the log of a stage."""
        subject = f"{model}@{stage}"
        try:
            entries = read_log(self._storage, model, stage)
            self._num_entries += len(entries)
            self._findings += _check_entries(self._storage, subject, entries)
        except RegaugeError as error:
            self._findings.append(RegistryFinding(subject, error.problem, error.remedy))


def _list_all_stages(storage: RegistryStorage, name: str) -> list[str]:
    """Return the stages that have a pointer or a log."""
    return sorted({*list_stages(storage, name), *storage.list_names(join_key(MODELS, name, LOG))})


def _check_lineage(version: RegisteredVersion, subject: str) -> Iterator[RegistryFinding]:
    """Yield the differences between the lineage of a version and its files."""
    remedy = "register the artifact again"
    document = version.document
    if version.kind == "artifact":
        manifest_hash = version.hashes.get(config.MANIFEST)
        content_sha256 = None if manifest_hash is None else manifest_hash.sha256
        storage, key = version.file_storage
        path = f"{key}/{config.MANIFEST}" if key else config.MANIFEST
        content = storage.read(path) or b""
        manifest = parse_document(content, storage.locate(path), ArtifactShape)
        if manifest["origin"]["sha256"] != document["lineage"]["checkpoint"]["weights_sha256"]:
            yield RegistryFinding(
                subject, "its lineage names other weights than its manifest", remedy
            )
    else:
        content_sha256 = compute_content_hash(version.hashes)
    if content_sha256 != version.content_sha256:
        yield RegistryFinding(subject, "its content_sha256 is not that of its files", remedy)
    parent = document.get("parent")
    if parent is not None and find_version(version.storage, version.model, parent) is None:
        yield RegistryFinding(subject, f"its parent, version {parent}, is missing", remedy)


def _check_entries(
    storage: RegistryStorage, subject: str, entries: list[StageEntry]
) -> Iterator[RegistryFinding]:
    """Yield the differences between the entries of a log, and to the versions that they name."""
    previous_sha256: str | None = None
    restore = "restore the log from a copy of the registry"
    for entry in entries:
        document = entry.document
        name, number = document["model"], entry.version
        location = storage.locate(entry_key(name, document["stage"], entry.number))
        if document["previous_sha256"] != previous_sha256:
            yield RegistryFinding(subject, f"{location} does not follow the entry before", restore)
        version = find_version(storage, name, number)
        if version is None:
            problem = f"{location} names version {number}, which is missing"
            yield RegistryFinding(
                subject, problem, "restore that version from a copy of the registry"
            )
        elif version.content_sha256 != document["content_sha256"]:
            problem = f"{location} names another content of version {number}"
            yield RegistryFinding(subject, problem, restore)
        previous_sha256 = compute_sha256(entry.content)
