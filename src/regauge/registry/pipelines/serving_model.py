"""The model that serves: the version of a registry that a stage points to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regauge import config
from regauge.registry.documents import REGISTRY_FILE
from regauge.registry.model_reference import fetch_version
from regauge.registry.registry import Registry
from regauge.registry.stages import find_pointer
from regauge.registry.storage import open_storage
from regauge.system.errors import DataError
from regauge.system.json_files import DocumentShape

if TYPE_CHECKING:
    from regauge.registry.pipelines.settings import RegistryModel

PROMOTION = "promotion.json"
"""The record of a promotion, in its output folder; it is written before the stage is moved."""


class PromotionShape(DocumentShape):
    """The record of a promotion."""

    version: str


@dataclass(frozen=True)
class ServingModel:
    """A version of a model."""

    version: str
    """Its number in the registry."""
    artifact: str
    """Its local folder: in the registry, or downloaded from an S3 store."""
    run: str | None
    """The output folder of the run that trained it; None if it is unknown."""
    is_trainable: bool
    """Whether its folder has the weights of a transformers model."""

    @property
    def start(self) -> str:
        """The folder that training starts from; raises DataError if it is gone."""
        if self.is_trainable:
            return self.artifact
        if self.run is None or not (Path(self.run) / config.SAVED_RUN).is_file():
            problem = f"version {self.version} was trained in {self.run or 'an unknown run'}"
            remedy = "restore that folder, or remove model.init_from"
            raise DataError(f"{problem}, which is missing", remedy)
        return self.run


def find_serving(settings: RegistryModel, version: str | None = None) -> ServingModel | None:
    """Return a version of a model, by default the one that serves; None if none serves yet.

    A version in an S3 store is downloaded, unless it was before. Raises the errors of the registry,
    such as DataError for a damaged one.
    """
    if open_storage(settings.path).read(REGISTRY_FILE) is None and version is None:
        return None
    registry = Registry(settings.path)
    if version is None:
        pointer = find_pointer(registry.storage, settings.model, settings.stage)
        if pointer is None:
            return None
        version = str(pointer.version)
    registered = registry.resolve(settings.model, int(version))
    run = registered.document["lineage"]["checkpoint"].get("run")
    is_local = registered.file_storage[0].local_folder is not None
    folder = registered.folder if is_local else str(fetch_version(registered))
    return ServingModel(version, folder, run, registered.kind == "model")


def read_promoted_version(folder: Path) -> str | None:
    """Return the version that a promotion in a folder has moved, or was about to move."""
    document = config.find_document(folder / PROMOTION, "remove it", PromotionShape)
    return None if document is None else str(document["version"])
