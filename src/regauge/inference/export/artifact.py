"""Artifact folder: written atomically, verified before use.

A payload may be code. It is loaded only from the folder named by the user, after a hash comparison
with the manifest. The hash proves that the payload is the exported one, not who exported it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from regauge import accelerators, config
from regauge.inference.export.manifest import (
    KIND,
    MANIFEST,
    MODEL,
    PAYLOAD,
    TOKENIZER,
    WEIGHTS,
    ArtifactManifest,
    FileDigest,
    ProgramEntry,
)
from regauge.models.settings import GREEDY, Generation
from regauge.system.errors import DataError, PreflightError, SettingsError
from regauge.system.files import sha256
from regauge.system.hub import CONFIG
from regauge.system.json_files import find_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from regauge.accelerators import Accelerator

EXPORT_REMEDY = "export it on this machine"


@dataclass(frozen=True)
class Artifact:
    """An artifact folder and the manifest."""

    folder: Path
    manifest: ArtifactManifest
    generation: Generation = GREEDY
    """How text is generated."""
    source: Path | None = None
    """Original folder, if this one is a copy."""
    needs_proof: ClassVar[bool] = True
    """Whether outputs need a proof of independence from the batch."""

    @property
    def origin(self) -> Path:
        """Folder to name in messages."""
        return self.source or self.folder

    @cached_property
    def program(self) -> ProgramEntry:
        """The manifest's `program` table, for the options in `generation`."""
        return self.manifest.program.with_generation(self.generation)

    @property
    def generation_options(self) -> Generation:
        """The `generation` options with the number of new tokens filled in."""
        return self.generation.model_copy(update={"max_new_tokens": self.program.output_size})

    @property
    def content_sha256(self) -> str:
        """Hash of the manifest, which has the hashes of all other files."""
        return sha256(self.folder / MANIFEST)

    @cached_property
    def accelerator(self) -> Accelerator:
        """Accelerator that the artifact was compiled for."""
        kinds = accelerators.survey()
        kind = self.manifest.target.accelerator
        if kind not in kinds:
            problem = f"{self.origin} needs accelerator '{kind}', which is unknown here"
            raise PreflightError(problem, EXPORT_REMEDY)
        accelerator: Accelerator = config.parse_choice("accelerators", kind)
        return accelerator

    @property
    def payload_folder(self) -> Path:
        """Folder written by the backend."""
        return self.folder / PAYLOAD

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / TOKENIZER

    @property
    def weights_file(self) -> Path | None:
        """The file with all weights and buffers, if there is one."""
        return self.folder / WEIGHTS

    def load_weights(self) -> Mapping[str, Tensor]:
        """Return name -> weight or buffer, on the CPU."""
        from safetensors.torch import load_file

        return load_file(self.folder / WEIGHTS)

    def restore_program(self) -> nn.Module:
        """Return the program and weights, for backends that do not compile ahead of time."""
        from regauge.inference.export.restore import restore_program

        return restore_program(self.manifest, self.folder / MODEL, self.load_weights())

    def read_model_config(self) -> dict[str, Any]:
        """Return the model configuration; empty if the artifact has none."""
        return find_json(self.folder / MODEL / CONFIG, EXPORT_REMEDY) or {}

    def check_target(self) -> None:
        """Raise PreflightError if this machine cannot run the artifact."""
        target, accelerator = self.manifest.target, self.accelerator
        availability = accelerator.available()
        if availability.fitness == 0:
            problem = (
                f"{self.origin} needs accelerator '{target.accelerator}': {availability.reason}"
            )
            raise PreflightError(problem, EXPORT_REMEDY)
        missing = sorted(set(target.required_features) - accelerator.features())
        if missing:
            problem = f"{self.origin} needs {', '.join(missing[:4])}, which this machine lacks"
            raise PreflightError(problem, f"{EXPORT_REMEDY}, or for older CPUs with --portable")
        backend = self.manifest.compiled.backend
        availability = backend.available()
        if availability.fitness == 0:
            problem = f"{self.origin} needs backend '{backend.kind}': {availability.reason}"
            raise PreflightError(problem, "install it, or export for another backend")


def open_artifact(folder: Path | str, generation: Generation = GREEDY) -> Artifact:
    """Verify an artifact and return it, without loading payload and weights.

    Raises SettingsError for a missing artifact, or if `generation` does not fit it. Raises
    DataError if a file is damaged or changed, and PreflightError if this machine cannot run it.
    """
    artifact = replace(open_unchecked(folder), generation=generation)
    _check_files(artifact)
    artifact.check_target()
    artifact.program  # noqa: B018 - raises SettingsError
    return artifact


def is_artifact(folder: Path) -> bool:
    """Return whether a folder looks like an artifact, even a damaged one."""
    parts = ((folder / name).exists() for name in (WEIGHTS, PAYLOAD))
    return (folder / MANIFEST).is_file() and any(parts)


def open_unchecked(folder: Path | str) -> Artifact:
    """Return an artifact and its manifest, without checking other files or this machine."""
    return Artifact(Path(folder), read_manifest(Path(folder)))


def read_manifest(folder: Path) -> ArtifactManifest:
    """Read an artifact's manifest.

    Raises SettingsError if the folder is not an artifact, and DataError if the manifest is damaged.
    """
    path = folder / MANIFEST
    remedy = "name a folder that 'regauge export' wrote"
    document = find_json(path, "copy the artifact again")
    if document is None:
        raise SettingsError(f"no artifact at {folder}: {MANIFEST} is missing", remedy)
    if document.get("kind") != KIND:
        raise SettingsError(f"{path} is not the manifest of an artifact", remedy)
    config.check_format(document, path, "export the model again")
    try:
        return config.build(ArtifactManifest, document, (), str(path))
    except SettingsError as error:
        raise DataError(error.problem, "copy the artifact again, or export it") from None


def hash_files(folder: Path) -> dict[str, FileDigest]:
    """Return relative path -> size and hash of every file in a folder except the manifest."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): FileDigest(bytes=path.stat().st_size, sha256=sha256(path))
        for path in paths
        if path != folder / MANIFEST
    }


def _check_files(artifact: Artifact) -> None:
    """Raise DataError if a file is missing, truncated, changed, or not in the manifest."""
    root = artifact.folder.resolve()
    for name, digest in artifact.manifest.files.items():
        path = artifact.folder / name
        if not path.resolve().is_relative_to(root):
            raise DataError(f"{path} is outside of the artifact", "export it again")
        if not path.is_file():
            raise DataError(f"{path} is missing", "copy the artifact again")
        size = path.stat().st_size
        if size != digest.bytes:
            problem = f"{path} has {size} bytes; {digest.bytes} were exported"
            raise DataError(problem, "copy the artifact again")
        if sha256(path) != digest.sha256:
            problem = f"{path} has changed since it was exported: its hash differs"
            raise DataError(problem, "copy the artifact again, or export it")
    loaded_files = {*list_files(artifact.payload_folder), *list_files(artifact.tokenizer_folder)}
    if unknown := loaded_files - artifact.manifest.files.keys():
        raise DataError(f"{artifact.folder / min(unknown)} was not exported", "remove it")


def list_files(subfolder: Path) -> list[str]:
    """Return payload or tokenizer files by their paths in the artifact."""
    paths = (path for path in subfolder.rglob("*") if path.is_file())
    return [str(path.relative_to(subfolder.parent)) for path in paths]
