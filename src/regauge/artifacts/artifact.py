"""An artifact as a folder: written aside and renamed, and opened only where it is whole and fits.

A payload may be code. It is loaded from the folder that the user named and from nowhere else, after
its hash was compared; that says that it is what was exported, not who exported it.
"""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from regauge import accelerators, config
from regauge.artifacts.manifest import KIND, MANIFEST, PAYLOAD, TOKENIZER, WEIGHTS, Manifest, Stored
from regauge.checkpoint.layout import check_free
from regauge.config import FORMAT
from regauge.errors import DataError, PreflightError, SettingsError
from regauge.files import sha256

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from regauge.accelerators import Accelerator

EXPORT_AGAIN = "export it on this machine"


@dataclass(frozen=True)
class Artifact:
    """An artifact that was opened."""

    folder: Path
    manifest: Manifest

    @cached_property
    def accelerator(self) -> Accelerator:
        """The device that it is for."""
        kinds = accelerators.survey()
        kind = self.manifest.target.accelerator
        if kind not in kinds:
            raise PreflightError(f"{self.folder} is for a device '{kind}'", EXPORT_AGAIN)
        found: Accelerator = config.choose("accelerators", kind)
        return found

    @property
    def payload(self) -> Path:
        """What its backend wrote."""
        return self.folder / PAYLOAD

    @property
    def tokenizer(self) -> Path:
        """The folder of its tokenizer."""
        return self.folder / TOKENIZER

    def weights(self) -> Mapping[str, Tensor]:
        """Return its weights and buffers by name, on the CPU."""
        from safetensors.torch import load_file

        return load_file(self.folder / WEIGHTS)

    def check_target(self) -> None:
        """Raise PreflightError where this machine is not one that the artifact is for."""
        target, accelerator = self.manifest.target, self.accelerator
        found = accelerator.available()
        if found.fitness == 0:
            problem = f"{self.folder} is for '{target.accelerator}': {found.reason}"
            raise PreflightError(problem, EXPORT_AGAIN)
        missing = sorted(set(target.needs) - accelerator.features())
        if missing:
            problem = f"{self.folder} needs {', '.join(missing[:4])}, which this machine lacks"
            raise PreflightError(problem, f"{EXPORT_AGAIN}, or for more of them with --portable")
        backend = self.manifest.compiled.backend
        reason = backend.available()
        if reason.fitness == 0:
            problem = f"{self.folder} is computed by '{backend.kind}': {reason.reason}"
            raise PreflightError(problem, "install it, or export for another backend")


def opened(folder: Path | str) -> Artifact:
    """Return an artifact that is whole and fits this machine; nothing of it has been loaded.

    Raises SettingsError where there is none, DataError for one that is damaged or was changed, and
    PreflightError for one that is for another machine.
    """
    artifact = located(folder)
    _check_files(artifact)
    artifact.check_target()
    return artifact


def is_one(folder: Path) -> bool:
    """Return whether a folder looks like an artifact, be it a damaged one."""
    parts = ((folder / name).exists() for name in (WEIGHTS, PAYLOAD))
    return (folder / MANIFEST).is_file() and any(parts)


def located(folder: Path | str) -> Artifact:
    """Return an artifact by what it says of itself; its files have not been looked at."""
    return Artifact(Path(folder), read(Path(folder)))


def read(folder: Path) -> Manifest:
    """Return what an artifact says of itself; raises SettingsError for what is none."""
    path = folder / MANIFEST
    remedy = "name a folder that 'regauge export' wrote"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise SettingsError(f"no artifact at {folder}: there is no {MANIFEST}", remedy) from None
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}", "copy the artifact again") from None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise SettingsError(f"{path} is no artifact's", remedy)
    if not isinstance(document.get("format"), int) or document["format"] > FORMAT:
        problem = f"{path} has format {document.get('format')}, and this Regauge reads {FORMAT}"
        raise SettingsError(problem, "install a later Regauge")
    try:
        return config.build(Manifest, document, (), str(path))
    except SettingsError as error:
        raise DataError(error.problem, "copy the artifact again, or export it") from None


@contextmanager
def written(folder: Path) -> Iterator[Path]:
    """Give a folder beside an artifact's place to fill; it takes that place when all went well.

    Raises SettingsError where something is there.
    """
    check_free(folder)
    aside = folder.with_name(f".{folder.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        if folder.is_dir():
            folder.rmdir()
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def stored(folder: Path) -> dict[str, Stored]:
    """Return every file of a folder but the manifest, by its path, with its hash."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): Stored(bytes=path.stat().st_size, sha256=sha256(path))
        for path in paths
        if path != folder / MANIFEST
    }


def _check_files(artifact: Artifact) -> None:
    """Raise DataError for a file that is absent, cut, changed, or none of the artifact's own."""
    root = artifact.folder.resolve()
    for name, facts in artifact.manifest.files.items():
        path = artifact.folder / name
        if not path.resolve().is_relative_to(root):
            raise DataError(f"{path} lies outside of the artifact", "export it again")
        if not path.is_file():
            raise DataError(f"{path} is missing", "copy the artifact again")
        size = path.stat().st_size
        if size != facts.bytes:
            problem = f"{path} has {size} bytes, and {facts.bytes} were exported"
            raise DataError(problem, "copy the artifact again")
        if sha256(path) != facts.sha256:
            problem = f"{path} is not what was exported: its hash is another"
            raise DataError(problem, "copy the artifact again, or export it")
    read_whole = {*stored_names(artifact.payload), *stored_names(artifact.tokenizer)}
    if strange := read_whole - artifact.manifest.files.keys():
        raise DataError(f"{artifact.folder / min(strange)} was not exported", "remove it")


def stored_names(part: Path) -> list[str]:
    """Return the files of a payload or a tokenizer by their paths in the artifact."""
    paths = (path for path in part.rglob("*") if path.is_file())
    return [str(path.relative_to(part.parent)) for path in paths]
