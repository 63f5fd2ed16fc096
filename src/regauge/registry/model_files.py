"""Files of a model to register: an artifact, or a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from regauge import config
from regauge.registry.storage import FileHash
from regauge.system import files
from regauge.system.errors import DataError
from regauge.system.hub import combine_hashes, list_model_files, resolve_model
from regauge.system.json_files import DocumentShape, check_shape, find_json

if TYPE_CHECKING:
    import os

    from regauge.registry.storage import RegistryStorage

ARTIFACT_KIND = "regauge artifact"
PARITY_FILE = "parity.json"
COPY_AGAIN = "copy the artifact again, or export it"


class OriginShape(DocumentShape):
    """Origin of an artifact's weights."""

    path: str
    step: str
    sha256: str
    run_id: str | None = None


class ArtifactShape(DocumentShape):
    """Artifact manifest keys read by the registry."""

    format: int
    kind: Literal["regauge artifact"]
    files: dict[str, FileHash]
    origin: OriginShape


class ModelFiles(NamedTuple):
    folder: Path
    kind: Literal["artifact", "model"]
    content_sha256: str
    """Hash recorded by `predict`: for an artifact, the manifest's hash."""
    hashes: dict[str, FileHash]
    """Path in the folder -> file hash."""
    origin: OriginShape | None
    """Origin of the weights; None if the model was not exported."""


def inspect_model(path: str | os.PathLike[str]) -> ModelFiles:
    """Return the files of an artifact, or of the model in a run or folder.

    Raises DataError if an artifact file is missing or has changed, and SettingsError without a
    model.
    """
    folder = Path(path).expanduser()
    if (document := find_manifest(folder)) is not None:
        return _inspect_artifact(folder, document)
    folder = resolve_model(str(folder), fetch=False)
    names = [str(item.relative_to(folder)) for item in list_model_files(folder)]
    hashes = {name: _hash_file(folder, name) for name in names}
    return ModelFiles(folder, "model", compute_content_hash(hashes), hashes, None)


def find_manifest(folder: Path) -> ArtifactShape | None:
    """Return an artifact's manifest, if the folder has one.

    Raises DataError if it is damaged.
    """
    path = folder / config.MANIFEST
    document = find_json(path, COPY_AGAIN)
    if document is None or document.get("kind") != ARTIFACT_KIND:
        return None
    config.check_format(document, path, "export the model again")
    check_shape(document, path, COPY_AGAIN, ArtifactShape)
    return ArtifactShape.model_validate(document)


def compute_content_hash(hashes: dict[str, FileHash]) -> str:
    """Return a model folder's identifying hash, computed from the file hashes."""
    return combine_hashes({name: item.sha256 for name, item in hashes.items()})


def find_difference(
    storage: RegistryStorage, prefix: str, hashes: dict[str, FileHash]
) -> str | None:
    """Return the first missing or changed file with the difference, if any."""
    for name, expected in hashes.items():
        key = f"{prefix}/{name}" if prefix else name
        actual, location = storage.hash_file(key), storage.locate(key)
        if actual is None:
            return f"{location} is missing"
        if actual.bytes != expected.bytes:
            return f"{location} has {actual.bytes} bytes, not {expected.bytes}"
        if actual.sha256 != expected.sha256:
            return f"{location} has changed: its hash differs"
    return None


def _inspect_artifact(folder: Path, manifest: ArtifactShape) -> ModelFiles:
    root = folder.resolve()
    hashes = dict(manifest.files)
    for name, expected in hashes.items():
        path = folder / name
        if not path.resolve().is_relative_to(root):
            raise DataError(f"{path} is outside of the artifact", "export it again")
        if not path.is_file():
            raise DataError(f"{path} is missing", COPY_AGAIN)
        if _hash_file(folder, name) != expected:
            raise DataError(f"{path} has changed since it was exported", COPY_AGAIN)
    hashes[config.MANIFEST] = _hash_file(folder, config.MANIFEST)
    content_sha256 = hashes[config.MANIFEST].sha256
    return ModelFiles(folder, "artifact", content_sha256, hashes, manifest.origin)


def _hash_file(folder: Path, name: str) -> FileHash:
    path = folder / name
    return FileHash(bytes=path.stat().st_size, sha256=files.sha256(path))
