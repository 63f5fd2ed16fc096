"""The registry: opens it, and has one method for each action."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from regauge.registry import registered_version, stages
from regauge.registry.registry_documents import (
    DEFAULT_STAGE,
    MODELS,
    REGISTRY_FILE,
    REGISTRY_KIND,
    RegistryShape,
    check_name,
    format_document,
    format_time,
    parse_time,
    read_document,
)
from regauge.registry.registry_storage import open_storage
from regauge.system.choices import did_you_mean
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from regauge.registry.registered_version import RegisteredVersion
    from regauge.registry.registry_storage import RegistryStorage
    from regauge.registry.stages import StageEntry


class Registry:
    """Versions of models with their lineage, and the stages that point to them.

    `address` is a folder, or `s3://bucket/prefix`. With `create`, a registry is created there if
    there is none. Raises SettingsError if there is no registry, if the address has other files, or
    if the store has no conditional writes. Raises DataError if the registry is damaged or of
    another format.

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
        """The address of the registry."""
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
        """Add a version of a model and return it; the same content again returns that version.

        `model` is an artifact, or the output folder of a run, or the folder of a model. The lineage
        comes from the run that trained it: by default the origin of the artifact. `parent` is the
        version that training started from, `evaluation` has scores, and `usd` is the cost. By
        default they come from the run. With `by_reference` the files are not copied.

        Raises DataError if a file of the artifact has changed, and SettingsError if there is no
        model.
        """
        return registered_version.register_version(
            self.storage,
            name,
            model,
            run=run,
            parent=parent,
            evaluation=evaluation,
            usd=usd,
            by_reference=by_reference,
        )

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
        """Point a stage to a version, in one step, and return the entry of the log.

        All files of the version are hashed before. Nothing changes if the stage points to the
        version already. With `expected_version`, the stage must point to that version.

        Raises SettingsError for an unknown version or stage, DataError if a file is corrupted or
        the stage has another version than expected, and TransientError if another command has
        changed the stage meanwhile.
        """
        return stages.promote(
            self.storage,
            name,
            version,
            stage,
            why=why,
            expected_version=expected_version,
            create_stage=create_stage,
        )

    def roll_back(self, name: str, stage: str = DEFAULT_STAGE, *, why: str) -> StageEntry:
        """Point a stage to the version before, by its log, and return the entry of the log.

        A version that was rolled back is skipped. Raises SettingsError if there is no version
        before, and the errors of `promote`.
        """
        return stages.roll_back(self.storage, name, stage, why=why)

    def resolve(self, name: str, selector: str | int = DEFAULT_STAGE) -> RegisteredVersion:
        """Return the version of a stage, or the version with a number.

        Raises SettingsError for an unknown model, stage or version.
        """
        if not str(selector).isdigit():
            selector = stages.read_pointer(self.storage, name, str(selector)).version
        return registered_version.read_version(self.storage, name, int(selector))

    def list_models(self) -> list[str]:
        """Return the names of all models."""
        return self.storage.list_names(MODELS)

    def list_versions(self, name: str) -> list[RegisteredVersion]:
        """Return the versions of a model in order; raises SettingsError for an unknown model."""
        return registered_version.list_versions(self.storage, name)

    def list_stages(self, name: str) -> dict[str, int]:
        """Return the version of each stage of a model."""
        names = stages.list_stages(self.storage, name)
        return {stage: stages.read_pointer(self.storage, name, stage).version for stage in names}

    def read_log(self, name: str, stage: str = DEFAULT_STAGE) -> list[StageEntry]:
        """Return all changes of a stage in order; raises DataError if one is damaged."""
        return stages.read_log(self.storage, name, stage)

    def find_at(self, name: str, at: str, stage: str = DEFAULT_STAGE) -> RegisteredVersion | None:
        """Return the version that a stage had at a time; None before the first promotion.

        `at` is a time as in `2026-11-20T12:00`; without an offset it is in UTC. Raises
        SettingsError for another text, an unknown model or stage.
        """
        stages.read_pointer(self.storage, name, stage)
        entry = stages.find_entry_at(self.read_log(name, stage), parse_time(at))
        return None if entry is None else self.resolve(name, entry.version)

    def check_model(self, name: str) -> None:
        """Raise SettingsError if the registry has no model of this name."""
        models = self.list_models()
        if check_name(name) not in models:
            problem = f"the registry {self.address} has no model '{name}'"
            raise SettingsError(problem, did_you_mean(name, models))


def open_registry(address: str | os.PathLike[str], *, create: bool = False) -> Registry:
    """Return the registry at an address; raises the errors of `Registry`."""
    return Registry(address, create=create)


def _create(storage: RegistryStorage) -> None:
    """Create a registry; raises SettingsError if the address has other files."""
    if others := storage.list_names(""):
        problem = f"{storage.address} is no registry: it has other files ({others[0]})"
        raise SettingsError(problem, "name an empty folder or prefix")
    folder = storage.local_folder
    if folder is not None and folder.exists() and not folder.is_dir():
        raise SettingsError(f"{storage.address} is a file", "name a folder")
    storage.check_conditions()
    document = {"kind": REGISTRY_KIND, "created_at": format_time(time.time())}
    if not storage.create(REGISTRY_FILE, format_document(document)):
        read_document(storage, REGISTRY_FILE, RegistryShape)  # another process was faster
