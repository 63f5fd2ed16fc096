"""The registry: opens it, and has one method for each action."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from regauge.registry import registered_version, stages
from regauge.registry.documents import (
    CLAIM_FILE,
    DEFAULT_STAGE,
    FILES,
    KNOWN_STAGES,
    MODELS,
    REGISTRY_FILE,
    REGISTRY_KIND,
    VERSION_FILE,
    ClaimShape,
    RegistryShape,
    check_name,
    check_stage,
    find_user,
    format_document,
    format_time,
    parse_time,
    read_document,
    version_key,
)
from regauge.registry.lineage import collect_lineage, find_figures
from regauge.registry.model_files import find_difference, inspect_model
from regauge.registry.storage import open_storage
from regauge.system import timing
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError, SettingsError
from regauge.system.log import logger
from regauge.system.processes import inspect_process

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.registry.model_files import ModelFiles
    from regauge.registry.registered_version import RegisteredVersion
    from regauge.registry.stages import StageEntry
    from regauge.registry.storage import RegistryStorage

CLAIM_SECONDS = 300.0
"""How long to wait for another registration of the same content, whose process may have ended."""
MAX_CLAIMS = 100
"""Maximum numbers to try in a registration while others take them."""


class Registry:
    """Model versions with their lineage, and the stages that point to them.

    `address` is a folder, or `s3://bucket/prefix`. With `create`, a missing registry is created
    there. Raises SettingsError if the registry is missing, if the address contains other files, or
    if the store does not support conditional writes. Raises DataError if the registry is damaged or
    in another format.

    For example:

        >>> registry = regauge.Registry("registry")
        >>> registry.resolve("search", "production").number
        3
    """

    def __init__(self, address: str | os.PathLike[str], *, create: bool = False) -> None:
        self.storage: RegistryStorage = open_storage(address)
        if read_document(self.storage, REGISTRY_FILE, RegistryShape) is None:
            if not create:
                problem = f"no registry at {self.address}: {REGISTRY_FILE} is missing"
                raise SettingsError(
                    problem, "name another one, or create it by registering a model"
                )
            _create(self.storage)

    @property
    def address(self) -> str:
        """The registry's address."""
        return self.storage.address

    def register(
        self,
        name: str,
        model: str | os.PathLike[str],
        *,
        run: str | os.PathLike[str] | None = None,
        parent: int | None = None,
        evaluation: Mapping[str, Any] | None = None,
        usd: float | None = None,
        by_reference: bool = False,
    ) -> RegisteredVersion:
        """Add a model version and return it; the same content again returns that version.

        `model` is an artifact, a run's output folder, or a model folder. The lineage comes from the
        run that trained it, by default the artifact's origin. `parent` is the version that training
        started from, `evaluation` has scores, and `usd` is the cost. By default they come from the
        run. With `by_reference` the files are not copied.

        Raises DataError if an artifact file has changed, and SettingsError without a model.
        """
        check_name(name)
        files = inspect_model(model)
        versions = [*registered_version.scan_versions(self.storage, name)]
        same = registered_version.select_content(versions, files.content_sha256)
        if same is not None:
            logger.info("%s is already version %d of '%s'", model, same.number, name)
            return same
        if parent is not None:
            registered_version.read_version(self.storage, name, parent)
        run_folder = None if run is None else Path(run).expanduser()
        figures = find_figures(files, run_folder)
        lineage = collect_lineage(files, run_folder)
        document = {
            "model": name,
            "created_by": find_user(),
            "kind": files.kind,
            "content_sha256": files.content_sha256,
            "files": {key: item.model_dump() for key, item in sorted(files.hashes.items())},
            "lineage": lineage,
            "location": str(files.folder.resolve()) if by_reference else None,
            "parent": parent if parent is not None else self._find_parent(name, lineage),
            "parity": figures["parity"],
            "evaluation": dict(evaluation) if evaluation is not None else figures["evaluation"],
            "usd": usd if usd is not None else figures["usd"],
        }
        finished = {version.number for version in versions}
        number = self._claim_number(name, files.content_sha256, finished)
        if not isinstance(number, int):
            return number
        if not by_reference:
            self._upload_files(name, number, files)
        return self._commit(name, number, document)

    def promote(
        self,
        name: str,
        version: int,
        stage: str = DEFAULT_STAGE,
        *,
        why: str,
        expected_version: int | None = None,
        create_stage: bool = False,
    ) -> StageEntry:
        """Point a stage to a version, in one step, and return the log entry.

        All files in the version are hashed first. Nothing changes if the stage already points to
        the version. With `expected_version`, the stage must point to that version.

        Raises SettingsError for an unknown version or stage, DataError if a file is corrupted or
        the stage has another version than expected, and TransientError if another command has
        changed the stage meanwhile.
        """
        _check_reason(why)
        current = stages.find_pointer(self.storage, name, check_stage(stage))
        known = sorted({*KNOWN_STAGES, *stages.list_stages(self.storage, name)})
        if current is None and stage not in known and not create_stage:
            remedy = f"{did_you_mean(stage, known)} (or add --create-stage)"
            raise SettingsError(f"'{name}' has no stage '{stage}'", remedy)
        target = registered_version.read_version(self.storage, name, version)
        previous = None if current is None else current.version
        if expected_version is not None and previous != expected_version:
            actual = "empty" if previous is None else f"version {previous}"
            problem = f"{name}@{stage} is {actual}, not version {expected_version}"
            raise DataError(problem, "compare the candidate with that version, then promote it")
        if current is not None and previous == version:
            return current
        target.check_files()
        return stages.move_stage(target, stage, current, ("promote", why))

    def roll_back(self, name: str, stage: str = DEFAULT_STAGE, *, why: str) -> StageEntry:
        """Point a stage to the previous version in its log, and return the log entry.

        A version that was rolled back is skipped. Raises SettingsError without a previous version,
        and the same errors as `promote`.
        """
        _check_reason(why)
        current = stages.read_pointer(self.storage, name, stage)
        earlier = stages.list_history(self.read_log(name, stage))[:-1]
        if not earlier:
            problem = f"{name}@{stage} had no version before version {current.version}"
            raise SettingsError(problem, "promote another version instead")
        target = registered_version.read_version(self.storage, name, earlier[-1])
        target.check_files()
        return stages.move_stage(target, stage, current, ("rollback", why))

    def resolve(self, name: str, selector: str | int = DEFAULT_STAGE) -> RegisteredVersion:
        """Return a stage's version, or the version with a number.

        Raises SettingsError for an unknown model, stage or version.
        """
        if not str(selector).isdigit():
            selector = stages.read_pointer(self.storage, name, str(selector)).version
        return registered_version.read_version(self.storage, name, int(selector))

    def list_models(self) -> list[str]:
        """Return all model names."""
        return self.storage.list_names(MODELS)

    def list_versions(self, name: str) -> list[RegisteredVersion]:
        """Return a model's versions in order; raises SettingsError for an unknown model."""
        return registered_version.list_versions(self.storage, name)

    def list_stages(self, name: str) -> dict[str, int]:
        """Return stage -> version for a model."""
        names = stages.list_stages(self.storage, name)
        return {stage: stages.read_pointer(self.storage, name, stage).version for stage in names}

    def read_log(self, name: str, stage: str = DEFAULT_STAGE) -> list[StageEntry]:
        """Return all changes to a stage in order; raises DataError if one is damaged."""
        return stages.read_log(self.storage, name, stage)

    def find_at(self, name: str, at: str, stage: str = DEFAULT_STAGE) -> RegisteredVersion | None:
        """Return a stage's version at a given time; None before the first promotion.

        `at` is a time as in `2026-11-20T12:00`; without an offset it is in UTC. Raises
        SettingsError for other text, and for an unknown model or stage.
        """
        stages.read_pointer(self.storage, name, stage)
        time_at = parse_time(at)
        earlier = [entry for entry in self.read_log(name, stage) if entry.time <= time_at]
        return self.resolve(name, earlier[-1].version) if earlier else None

    def check_model(self, name: str) -> None:
        """Raise SettingsError if the registry does not contain this model."""
        models = self.list_models()
        if check_name(name) not in models:
            problem = f"the registry {self.address} has no model '{name}'"
            raise SettingsError(problem, did_you_mean(name, models))

    def _find_parent(self, name: str, lineage: dict[str, Any]) -> int | None:
        """Return the version whose run a run started from; None if it is not in the registry."""
        start = lineage["checkpoint"].get("start")
        path = start.get("path") if isinstance(start, dict) else start
        if not isinstance(path, str):
            return None
        run = str(Path(path).expanduser().resolve())
        for version in registered_version.scan_versions(self.storage, name):
            if version.document["lineage"]["checkpoint"].get("run") == run:
                return version.number
        return None

    def _claim_number(self, name: str, sha256: str, finished: set[int]) -> int | RegisteredVersion:
        """Reserve the next number, or return this content's version from another registration.

        A claim file reserves a number. Its writer has seen all earlier claims, so the first claim
        wins. Versions in `finished` have other content.
        """
        owner = {"by": find_user(), "pid": os.getpid(), "thread": threading.get_ident()}
        for _ in range(MAX_CLAIMS):
            numbers = registered_version.list_version_numbers(self.storage, name)
            others = {number: self._read_claim(name, number) for number in {*numbers} - finished}
            for number, other in sorted(others.items()):
                is_same = other.get("content_sha256") == sha256
                if is_same and (same := self._wait_for_end(name, number, other, owner)):
                    return same
            claimed = {number for number, other in others.items() if other}
            number = max(finished | claimed, default=0) + 1
            claim = {"id": uuid4().hex, "at": time.time(), "content_sha256": sha256, **owner}
            if self.storage.create(version_key(name, number, CLAIM_FILE), format_document(claim)):
                return number
        problem = f"other registrations took {MAX_CLAIMS} numbers of '{name}'"
        raise SettingsError(problem, "register it when they have ended")

    def _read_claim(self, name: str, number: int) -> dict[str, Any]:
        """Return the claim of a number; empty if its folder was just created."""
        return read_document(self.storage, version_key(name, number, CLAIM_FILE), ClaimShape) or {}

    def _wait_for_end(
        self, name: str, number: int, claim: dict[str, Any], owner: dict[str, Any]
    ) -> RegisteredVersion | None:
        """Wait for the end of another registration; return its version, or None if it failed."""
        is_own = {key: claim.get(key) for key in owner} == owner  # it has failed in this thread
        is_local = claim["by"] == owner["by"] and "pid" in claim
        is_dead = is_own or (is_local and not inspect_process(claim["pid"]).state)
        limit = 0.0 if is_dead else claim["at"] + CLAIM_SECONDS - time.time()
        return timing.wait_for(
            partial(registered_version.find_version, self.storage, name, number),
            limit,
            poll_seconds=timing.REMOTE_POLL_SECONDS,
        )

    def _upload_files(self, name: str, number: int, files: ModelFiles) -> None:
        prefix = version_key(name, number, FILES)
        for file in files.hashes:
            self.storage.upload(files.folder / file, f"{prefix}/{file}")
        if damage := find_difference(self.storage, prefix, files.hashes):
            problem = f"the copy of {files.folder} is damaged: {damage}"
            raise DataError(problem, "register it again")

    def _commit(self, name: str, number: int, document: dict[str, Any]) -> RegisteredVersion:
        """Write the version document, from which on the version exists."""
        key = version_key(name, number, VERSION_FILE)
        document = {**document, "version": number, "created_at": format_time(time.time())}
        if not self.storage.create(key, format_document(document)):
            problem = f"{self.storage.locate(key)} already exists"
            raise DataError(problem, "register the artifact again")
        stored = registered_version.read_version(self.storage, name, number)
        return registered_version.RegisteredVersion(self.storage, stored.document, is_new=True)


def _check_reason(why: str) -> None:
    if not why.strip():
        raise SettingsError("the change has no reason", "write one: --why TEXT")


def _create(storage: RegistryStorage) -> None:
    folder = storage.local_folder
    if folder is not None and folder.exists() and not folder.is_dir():
        raise SettingsError(f"{storage.address} is a file", "name a folder")
    if others := storage.list_names(""):
        problem = f"{storage.address} is not a registry: it contains other files ({others[0]})"
        raise SettingsError(problem, "name an empty folder or prefix")
    storage.check_conditions()
    document = {"kind": REGISTRY_KIND, "created_at": format_time(time.time())}
    if not storage.create(REGISTRY_FILE, format_document(document)):
        read_document(storage, REGISTRY_FILE, RegistryShape)  # another process was faster
