"""A dataset while it is made: a folder beside its place, locked, and moved there by one rename.

    <path>.partial/inputs.json   settings and pieces: what the dataset is made of
    <path>.partial/.lock         held by the process that works here
    <path>.partial/.work/        the tokenizer and the pieces that are done, removed in the end

Layouts with names make a dataset each, in folders of these names that move together. What is at
`<path>` is therefore always whole, and never written over.
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from regauge.config import FORMAT, flat
from regauge.data import dataset
from regauge.errors import DataError, SettingsError
from regauge.files import LOCK, is_temporary, locked, write_atomic
from regauge.log import logger

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.data.sources import Piece

INPUTS = "inputs.json"
OURS = (INPUTS, LOCK)


Manifests = dict[str, dataset.Manifest]


class Inputs(NamedTuple):
    """Everything that decides the bytes of a dataset."""

    settings: dict[str, Any]
    pieces: tuple[Piece, ...]
    datasets: tuple[str, ...]
    """Their folders inside of the one that is moved; "" is that folder itself."""

    def document(self) -> dict[str, Any]:
        """Return this as it is stored."""
        pieces = {piece.name: [piece.bytes, piece.stamp] for piece in self.pieces}
        return {"format": FORMAT, "settings": self.settings, "pieces": pieces}


def finished(folder: Path, inputs: Inputs) -> Manifests | None:
    """Return the manifests of the datasets that are wanted, if they lie there already.

    Raises DataError for another dataset, and for a folder with anything else in it.
    """
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise DataError(f"{folder} is a file", "choose another data.path")
    if not any(folder.iterdir()):
        return None
    known = _stored(folder)
    if known is None:
        name = min(path.name for path in folder.iterdir())
        raise DataError(
            f"{folder} holds something else ({name})", "choose another data.path, or empty it"
        )
    if known != inputs.document():
        raise DataError(
            f"{folder} holds another dataset: {difference(known, inputs.document())}",
            "choose another data.path, or delete that folder",
        )
    return {name: _whole(folder / name) for name in inputs.datasets}


def _whole(folder: Path) -> dataset.Manifest:
    """Return the manifest of a dataset; raises DataError where one of its files is gone."""
    paths = [folder / dataset.MANIFEST]
    if paths[0].exists():
        manifest = dataset.read_manifest(folder)
        files = (file for split in manifest.splits.values() for file in split.files)
        paths += [folder / file.file for file in files]
    gone = [path for path in paths if not path.exists()]
    if gone:
        raise DataError(f"{gone[0]} is gone", "delete the dataset's folder and run again")
    return manifest


class Work:
    """The unfinished dataset of one folder, locked for this process until it is closed."""

    def __init__(self, folder: Path, inputs: Inputs) -> None:
        self.folder = folder.with_name(f"{folder.name}.partial")
        self.work = self.folder / ".work"
        self.final = folder
        self._datasets = inputs.datasets
        with ExitStack() as stack:
            self._take(stack)
            self.started = self._known(inputs)
            self._lock = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def commit(self, manifests: Manifests) -> None:
        """Write the manifests, remove the work, and move the datasets to their place."""
        for name, manifest in manifests.items():
            text = manifest.model_dump_json(indent=1) + "\n"
            write_atomic(self.folder / name / dataset.MANIFEST, text)
        _remove(self.work)
        (self.folder / LOCK).unlink(missing_ok=True)
        try:
            self.folder.replace(self.final)
        except OSError as error:
            remedy = f"the dataset is whole in {self.folder}: move it"
            raise DataError(f"{self.final} cannot be written: {error}", remedy) from None

    def manifests(self) -> Manifests | None:
        """Return the manifests of datasets that only wait to be moved."""
        folders = {name: self.folder / name for name in self._datasets}
        if not all((folder / dataset.MANIFEST).exists() for folder in folders.values()):
            return None
        return {name: dataset.read_manifest(folder) for name, folder in folders.items()}

    def _take(self, stack: ExitStack) -> None:
        """Lock the folder until the stack is closed."""
        if self.folder.is_dir():
            paths = self.folder.iterdir()
            foreign = {path.name for path in paths if not _is_ours(path)}
            if foreign and _stored(self.folder) is None:
                raise DataError(
                    f"{self.folder} is no unfinished dataset ({min(foreign)})",
                    "move it away, or choose another data.path",
                )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(self.folder / LOCK))
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            remedy = "choose another data.path"
            raise SettingsError(f"{self.folder} cannot be made: {error}", remedy) from None
        except BlockingIOError:
            remedy = "wait for it, or choose another data.path"
            raise DataError(f"another prepare works in {self.folder}", remedy) from None

    def _known(self, inputs: Inputs) -> bool:
        """Return whether an earlier attempt left something to continue; discard another one.

        Files that a killed process left half written are removed.
        """
        document = inputs.document()
        known = _stored(self.folder)
        if known is not None and known != document:
            logger.warning(f"{self.folder} is begun anew: {difference(known, document)}")
            for path in self.folder.iterdir():
                if path.name not in OURS:
                    _remove(path)
        if known != document:
            write_atomic(self.folder / INPUTS, json.dumps(document, indent=1) + "\n")
        self.work.mkdir(exist_ok=True)
        for path in list(self.folder.rglob("*")):
            if is_temporary(path):
                path.unlink()
        return known == document


def _is_ours(path: Path) -> bool:
    return path.name in OURS or is_temporary(path)


def _remove(path: Path) -> None:
    """Remove a file, or a folder in a way that never leaves a half of it under its name."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    aside = path.with_name(f"{path.name}.discarded")
    shutil.rmtree(aside, ignore_errors=True)
    path.replace(aside)
    shutil.rmtree(aside)


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return the first thing in which two inputs differ, in words."""
    there, here = (
        {key: value for key, value in flat(each["settings"]) if value != {}} for each in (old, new)
    )
    for key in sorted({*there, *here}):
        if there.get(key) != here.get(key):
            return f"{key} was {there.get(key, 'not set')!r} and is {here.get(key, 'not set')!r}"
    changed = [
        name
        for name in {**old["pieces"], **new["pieces"]}
        if old["pieces"].get(name) != new["pieces"].get(name)
    ]
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"the source has changed ({changed[0]}{more})" if changed else "its format has changed"


def _stored(folder: Path) -> dict[str, Any] | None:
    """Return the inputs that a folder was begun with; None where there are none of ours."""
    try:
        document = json.loads((folder / INPUTS).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    known = isinstance(document, dict) and {"settings", "pieces"} <= set(document)
    return document if known else None
