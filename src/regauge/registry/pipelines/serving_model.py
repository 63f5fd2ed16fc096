"""The serving model: the registry version in a stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regauge import config
from regauge.config.output_files import SAVED_RUN
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
"""Promotion record in the output folder, written before the stage moves."""


class PromotionShape(DocumentShape):
    """The promotion record."""

    version: str


@dataclass(frozen=True)
class ServingModel:
    """A model version."""

    version: str
    """Version number in the registry."""
    artifact: str
    """Local folder: in the registry, or downloaded from an S3 store."""
    run: str | None
    """Output folder of the training run; None if unknown."""
    is_trainable: bool
    """Whether the folder contains transformers weights."""

    @property
    def start(self) -> str:
        """Start folder for training; raises DataError if it is gone."""
        if self.is_trainable:
            return self.artifact
        if self.run is None or not (Path(self.run) / SAVED_RUN).is_file():
            problem = f"version {self.version} was trained in {self.run or 'an unknown run'}"
            remedy = "restore that folder, or remove model.init_from"
            raise DataError(f"{problem}, which is missing", remedy)
        return self.run


def find_serving_version(settings: RegistryModel) -> str | None:
    """Return the number of the serving version; None if none serves yet.

    Only the stage is read, not the version's files. Raises the registry's errors.
    """
    if open_storage(settings.path).read(REGISTRY_FILE) is None:
        return None
    registry = Registry(settings.path)
    pointer = find_pointer(registry.storage, settings.model, settings.stage)
    return None if pointer is None else str(pointer.version)


def find_serving(settings: RegistryModel, version: str | None = None) -> ServingModel | None:
    """Return a model version, default: the serving one; None if none serves yet.

    A version in an S3 store is downloaded, unless it was before. Raises the registry's errors, such
    as DataError if it is damaged.
    """
    version = version or find_serving_version(settings)
    if version is None:
        return None
    registered = Registry(settings.path).resolve(settings.model, int(version))
    run = registered.document["lineage"]["checkpoint"].get("run")
    is_local = registered.file_storage[0].local_folder is not None
    folder = registered.folder if is_local else str(fetch_version(registered))
    return ServingModel(version, folder, run, registered.kind == "model")


def read_promoted_version(folder: Path) -> str | None:
    """Return the version that a promotion in a folder has moved, or was about to move."""
    document = config.find_document(folder / PROMOTION, "remove it", PromotionShape)
    return None if document is None else str(document["version"])
