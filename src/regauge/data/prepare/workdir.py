"""Build folder for unfinished datasets: locked, next to the final folder, and moved by a rename.

    <path>.partial/inputs.json   settings and pieces that determine the dataset
    <path>.partial/.lock         held by the process that builds the dataset
    <path>.partial/.work/        the tokenizer and the finished pieces; removed at the end

Named layouts make one dataset each, in subfolders that are moved together. So the content of
`<path>` is always complete, and it is never overwritten.
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from regauge.config import FORMAT, check_format, flatten, format_setting
from regauge.config.output_files import INPUTS
from regauge.data import dataset
from regauge.system.errors import DataError, SettingsError
from regauge.system.files import LOCK, hold_lock, is_temporary, write_atomic
from regauge.system.json_files import DocumentShape, find_valid_json, format_compact, seal
from regauge.system.log import logger

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.data.sources import Piece

OVERWRITE_REMEDY = "replace the dataset with --overwrite (in Python: overwrite=True)"
_DATASET_FILE = re.compile(
    rf"(train|heldout)(-texts)?-\d+\.arrow|{re.escape(dataset.MANIFEST)}|{dataset.TOKENIZER_FOLDER}"
    rf"|{re.escape(dataset.REJECTED)}"
)
"""Names of a dataset's files and folders."""
BUILD_FILES = (INPUTS, LOCK)
"""Files in a build folder, apart from the datasets."""


Manifests = dict[str, dataset.DatasetManifest]
"""Layout name -> manifest."""


class InputsShape(DocumentShape):
    """A dataset's inputs in stored form."""

    settings: dict[str, Any]
    pieces: dict[str, list[Any]]


class BuildInputs(NamedTuple):
    """Everything with an effect on the datasets' bytes."""

    settings: dict[str, Any]
    """Run file tables."""
    pieces: tuple[Piece, ...]
    datasets: tuple[str, ...]
    """Dataset subfolders; "" is the folder itself."""
    num_validation: int = 0
    """How many pieces at the end come from the validation source."""

    @property
    def num_training(self) -> int:
        return len(self.pieces) - self.num_validation

    def to_document(self) -> dict[str, Any]:
        """Return the stored form, JSON-ready."""
        pieces = {piece.name: [piece.bytes, piece.stamp] for piece in self.pieces}
        return {"format": FORMAT, "settings": self.settings, "pieces": pieces}


def find_finished(folder: Path, inputs: BuildInputs) -> Manifests | None:
    """Return the manifests of finished datasets with these inputs, or None.

    Raises DataError if the folder has another dataset or other files.
    """
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise DataError(f"{folder} is a file", "choose another data.path")
    if not any(folder.iterdir()):
        return None
    document = _read_inputs(folder)
    if document is None:
        name = min(path.name for path in folder.iterdir())
        raise DataError(
            f"{folder} has other files ({name})", "choose another data.path, or empty the folder"
        )
    check_format(document, folder, f"choose another data.path, or {OVERWRITE_REMEDY}")
    if document != inputs.to_document():
        raise DataError(
            f"{folder} has another dataset: {describe_difference(document, inputs.to_document())}",
            f"choose another data.path, or {OVERWRITE_REMEDY}",
        )
    return {name: _read_complete(folder / name) for name in inputs.datasets}


def check_replaceable(folder: Path) -> None:
    """Raise DataError if a folder has files that do not belong to datasets."""
    if not folder.exists():
        return
    foreign = folder.name if not folder.is_dir() else _find_foreign_file(folder)
    if foreign:
        problem = f"{folder} has files that are not part of a dataset ({foreign})"
        raise DataError(problem, "choose another data.path, or move these files away")


def _find_foreign_file(folder: Path) -> str:
    entries = sorted(path for path in folder.iterdir() if not _is_build_file(path))
    if entries and not (folder / INPUTS).is_file():
        return entries[0].name
    for path in entries:
        is_dataset = path.is_dir() and (path / dataset.MANIFEST).is_file()
        contents = path.iterdir() if is_dataset else [path]
        for content in contents:
            if not _DATASET_FILE.fullmatch(content.name):
                return content.relative_to(folder).as_posix()
    return ""


def _read_complete(folder: Path) -> dataset.DatasetManifest:
    """Return a dataset's manifest; raises DataError if one of its files is missing."""
    paths = [folder / dataset.MANIFEST]
    if paths[0].exists():
        manifest = dataset.read_manifest(folder)
        files = (file for split in manifest.splits.values() for file in split.files)
        paths += [folder / file.file for file in files]
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise DataError(f"{missing[0]} is missing", "delete the dataset's folder and run again")
    return manifest


class BuildDir:
    """Build folder for unfinished datasets, locked by this process until closed."""

    def __init__(self, folder: Path, inputs: BuildInputs, *, overwrite: bool = False) -> None:
        """Lock the folder; with `overwrite`, `commit` replaces the datasets in the final folder."""
        self.folder = folder.with_name(f"{folder.name}.partial")
        self.scratch = self.folder / ".work"
        self.final = folder
        self._overwrite = overwrite
        self._datasets = inputs.datasets
        with ExitStack() as stack:
            self._acquire(stack)
            self.is_resumed = self._resume_or_reset(inputs)
            self._lock = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def commit(self, manifests: Manifests) -> None:
        """Write the manifests, remove the scratch folder, and move the datasets to their folder."""
        for name, manifest in manifests.items():
            document = json.loads(manifest.model_dump_json())
            text = format_compact(seal(document))
            write_atomic(self.folder / name / dataset.MANIFEST, text)
        _remove(self.scratch)
        (self.folder / LOCK).unlink(missing_ok=True)
        try:
            if self._overwrite:
                check_replaceable(self.final)
                _remove(self.final)
            self.folder.replace(self.final)
        except OSError as error:
            remedy = f"move {self.folder} there; it is complete"
            raise DataError(f"{self.final} cannot be written: {error.strerror}", remedy) from None

    def read_manifests(self) -> Manifests | None:
        """Return the manifests if all datasets are complete and only have to be moved."""
        folders = {name: self.folder / name for name in self._datasets}
        if not all((folder / dataset.MANIFEST).exists() for folder in folders.values()):
            return None
        return {name: dataset.read_manifest(folder) for name, folder in folders.items()}

    def _acquire(self, stack: ExitStack) -> None:
        if self.folder.is_dir():
            paths = self.folder.iterdir()
            other_files = {path.name for path in paths if not _is_build_file(path)}
            if other_files and _read_inputs(self.folder) is None:
                raise DataError(
                    f"{self.folder} has other files ({min(other_files)})",
                    "move it away, or choose another data.path",
                )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(hold_lock(self.folder / LOCK))
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            remedy = "choose another data.path"
            raise SettingsError(
                f"{self.folder} cannot be created: {error.strerror}", remedy
            ) from None
        except BlockingIOError:
            remedy = "wait for it, or choose another data.path"
            raise DataError(f"another prepare is writing to {self.folder}", remedy) from None

    def _resume_or_reset(self, inputs: BuildInputs) -> bool:
        """Return whether an earlier attempt with these inputs is resumed; discard any other one."""
        document = inputs.to_document()
        stored = _read_inputs(self.folder)
        if stored is not None and stored != document:
            logger.warning(f"restarting {self.folder}: {describe_difference(stored, document)}")
            for path in self.folder.iterdir():
                if path.name not in BUILD_FILES:
                    _remove(path)
        if stored != document:
            write_atomic(self.folder / INPUTS, json.dumps(document, indent=1) + "\n")
        self.scratch.mkdir(exist_ok=True)
        for path in list(self.folder.rglob("*")):
            if is_temporary(path):
                path.unlink()
        return stored == document


def _is_build_file(path: Path) -> bool:
    return path.name in BUILD_FILES or is_temporary(path)


def _remove(path: Path) -> None:
    """Remove a file or folder; a folder is renamed first, so that no partial one keeps its name."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    discarded = path.with_name(f"{path.name}.discarded")
    shutil.rmtree(discarded, ignore_errors=True)
    path.replace(discarded)
    shutil.rmtree(discarded)


def describe_difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Describe the first difference between two inputs."""
    old_values, new_values = (
        {key: value for key, value in flatten(document["settings"]) if value != {}}
        for document in (old, new)
    )
    for key in sorted({*old_values, *new_values}):
        before, after = old_values.get(key), new_values.get(key)
        if before != after:
            return f"{key} was {format_setting(before)} and is {format_setting(after)}"
    changed = [
        name
        for name in {**old["pieces"], **new["pieces"]}
        if old["pieces"].get(name) != new["pieces"].get(name)
    ]
    suffix = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"the source has changed ({changed[0]}{suffix})" if changed else "its format has changed"


def _read_inputs(folder: Path) -> dict[str, Any] | None:
    return find_valid_json(folder / INPUTS, InputsShape)
