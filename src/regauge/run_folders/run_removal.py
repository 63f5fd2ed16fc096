"""Removes a run, unless it is running or other work depends on it.

    .<name>.<8 hex digits>.removed    a run being removed, next to its former folder

The folder is renamed first, so that a run is either whole or gone. A killed removal leaves the
renamed folder behind; the next removal in the same folder deletes it.
"""

from __future__ import annotations

import secrets
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.config import flatten
from regauge.config.output_files import DONE, PIPELINE
from regauge.run_folders.documents import read_document
from regauge.run_folders.folder_lock import find_file_id, list_held_locks
from regauge.run_folders.run_list import find_runs
from regauge.run_folders.run_tail import is_any_run, list_job_folders, read_run_tail
from regauge.system.errors import SettingsError
from regauge.system.files import LOCK, hold_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

REMOVED = ".removed"
REGISTRY = "registry.json"
VERSION = "version.json"
"""A version's document in a model registry."""
STOP_FIRST = "stop it first"


def check_removable(folder: Path, root: Path) -> None:
    """Raise SettingsError if a run is running, or if other work below `root` depends on it.

    Also raised for a folder that is not a run's output folder.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise SettingsError(f"{folder} is not a folder", "name a run's output folder")
    if (folder / PIPELINE).is_file():
        remedy = "name one of its stages, or delete the folder"
        raise SettingsError(f"{folder} is a pipeline folder", remedy)
    if not is_any_run(folder):
        raise SettingsError(f"{folder} does not contain a run", "name a run's output folder")
    tail = read_run_tail(folder)
    if tail.is_locked or tail.find_state(time.time()) in ("running", "stopped"):
        raise SettingsError(f"{folder} is running", STOP_FIRST)
    user = next(_list_users(folder, root, tail.identity.get("run_id")), None)
    if user is not None:
        raise SettingsError(f"{user} depends on {folder}", f"remove {user} first")


def _list_users(folder: Path, root: Path, run_id: str | None) -> Iterator[Path]:
    """Yield the stages, runs and registered versions that depend on a run."""
    yield from _list_dependent_stages(folder)
    path = folder.resolve()
    for other in find_runs(root) if root.is_dir() else ():
        if other.resolve() == path:
            continue
        tail = read_run_tail(other)
        if any(_is_inside(value, path) for _, value in flatten(tail.settings) if value):
            yield other
    for registry in root.rglob(REGISTRY) if root.is_dir() else ():
        for version in registry.parent.rglob(VERSION):
            values = [value for _, value in _flatten_all(read_document(version))]
            if any(value == run_id for value in values if run_id) or any(
                _is_inside(value, path) for value in values
            ):
                yield version.parent


def _list_dependent_stages(folder: Path) -> Iterator[Path]:
    """Yield finished stages in the same pipeline, or in the same rounds, that used this stage."""
    has_rounds = (folder.parent.parent / PIPELINE).is_file()
    stage = folder.parent if has_rounds else folder
    name, sha256 = stage.name.partition("-")[2], read_document(folder / DONE).get("sha256")
    if not name or not (stage.parent / PIPELINE).is_file():
        return
    for done in sorted(stage.parent.glob(f"*/*/{DONE}" if has_rounds else f"*/{DONE}")):
        inputs = read_document(done).get("inputs")
        used = inputs.get(name) if isinstance(inputs, dict) else None
        if used and (used == sha256 or not has_rounds):
            yield done.parent


def _flatten_all(document: Any) -> list[tuple[str, Any]]:
    """Return all values in a document, including those in lists."""
    if isinstance(document, list):
        document = {str(index): item for index, item in enumerate(document)}
    if not isinstance(document, dict):
        return [("", document)]
    return [leaf for value in document.values() for leaf in _flatten_all(value)]


def _is_inside(value: Any, folder: Path) -> bool:
    """Return whether a value is the path to a folder, or to something in it."""
    if isinstance(value, list | tuple):
        return any(_is_inside(item, folder) for item in value)
    if not isinstance(value, str) or "/" not in value or "\0" in value:
        return False
    try:
        path = Path(value).expanduser().resolve()
    except (OSError, RuntimeError):  # too long, or a loop of links
        return False
    return path == folder or folder in path.parents


def remove_run(folder: Path, root: Path) -> None:
    """Remove a run's output folder; readers never see part of it.

    Raises SettingsError like `check_removable`, also if the run has started meanwhile.
    """
    check_removable(folder, root)
    folder = folder.resolve()
    _remove_leftovers(folder.parent)
    removed = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{REMOVED}")
    with ExitStack() as stack:
        for home in (folder, *list_job_folders(folder)):
            try:
                stack.enter_context(hold_lock(home / LOCK))
            except BlockingIOError:
                raise SettingsError(f"{folder} is running", STOP_FIRST) from None
        folder.rename(removed)
        shutil.rmtree(removed)


def _remove_leftovers(parent: Path) -> None:
    """Delete the folders left by killed removals, unless another process still deletes them."""
    locks = list_held_locks()
    for path in parent.glob(f".*{REMOVED}"):
        if find_file_id(path / LOCK) not in locks:
            shutil.rmtree(path, ignore_errors=True)
