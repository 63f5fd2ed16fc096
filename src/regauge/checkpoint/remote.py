"""Checkpoints in an object store: the same files under the same names, the manifest last.

    <root>/step-00000100/*.safetensors, state.json    put there by the process that hashed them
    <root>/step-00000100/manifest.json                without it there is no checkpoint
    <root>/LATEST                                     the newest: a listing may lag behind it

Every process writes its files to a folder of this machine first. No torch here.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

import fsspec

from regauge import object_store
from regauge.checkpoint.layout import LATEST, MANIFEST, name_of, number_of, part_of
from regauge.errors import SettingsError, TransientError, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

T = TypeVar("T")
ANSWER_SECONDS = 120.0
"""How long a request may go on without a part of a file: below it there are tries that nobody sees.

s3fs makes five, each of them up to 20 s without an answer and with 1.9 s of waits between them.
"""
PROBE = ".regauge-probe"


class _Progress(fsspec.Callback):  # type: ignore[misc]
    """Calls a function whenever a part of a file has come over."""

    def __init__(self, heard: Callable[[], None]) -> None:
        super().__init__()
        self._heard = heard

    def relative_update(self, inc: int = 1) -> None:
        """Take note of more bytes."""
        super().relative_update(inc)
        self._heard()


class Remote:
    """The checkpoints of a run under a root that fsspec knows, such as `s3://bucket/run`.

    One thread at a time uses it, and another may look whether it is `asking`. Raises SettingsError
    where the root cannot be opened.
    """

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._until = -math.inf
        try:
            self._files, path = object_store.opened(self.root)
        except SettingsError as error:
            raise error.within(f"output.checkpoint.root = '{root}'") from None
        self._path = path.rstrip("/")

    @property
    def asking(self) -> bool:
        """Whether the store is asked just now, and may still answer: it is slow, nothing hangs."""
        return time.monotonic() < self._until

    def check(self) -> str | None:
        """Write and remove a small key; return why that cannot be done, or None."""
        key = f"{self._path}/{PROBE}-{uuid4().hex}"
        try:
            self._files.pipe_file(key, b"regauge")
            self._files.rm_file(key)
        except Exception as error:  # noqa: BLE001 - every store has errors of its own
            return plain(error)
        return None

    def put(self, part: Path, step: int, names: Iterable[str]) -> None:
        """Copy files of a part folder, one after the other."""
        for name in names:
            key = f"{self._path}/{name_of(step)}/{name}"
            self._tried(partial(self._copied, self._files.put_file, str(part / name), key))

    def withdraw(self, step: int) -> None:
        """Make a step's checkpoint none, before its files are written again or removed."""
        self._tried(lambda: self._remove(f"{self._path}/{name_of(step)}/{MANIFEST}"))

    def commit(self, manifest: Path, step: int) -> None:
        """Write the manifest, which makes the files a checkpoint, and then which is the newest."""
        key = f"{self._path}/{name_of(step)}/{MANIFEST}"
        self._tried(lambda: self._files.pipe_file(key, manifest.read_bytes()))
        pointer = f"{self._path}/{LATEST}"
        self._tried(lambda: self._files.pipe_file(pointer, f"{name_of(step)}\n".encode()))

    def steps(self) -> list[int]:
        """Return the steps that may have a checkpoint, newest first: listed, or pointed at."""
        names = {path.rstrip("/").rpartition("/")[2] for path in self._tried(self._listed)}
        pointer = self._read(f"{self._path}/{LATEST}")
        names.add(pointer.decode(errors="replace").strip() if pointer else "")
        numbers = (number_of(name) for name in names)
        return sorted((number for number in numbers if number is not None), reverse=True)

    def fetch(self, step: int, root: Path) -> bool:
        """Copy a step's checkpoint into a folder of this machine; False where there is none.

        The folder takes its place once it is there as a whole; its hashes are not checked here.
        """
        source = f"{self._path}/{name_of(step)}"
        manifest = self._read(f"{source}/{MANIFEST}")
        if manifest is None:
            return False
        try:
            names = list(json.loads(manifest)["files"])
        except (ValueError, KeyError, TypeError):
            names = []
        part, final = part_of(root, step), root / name_of(step)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for name in names:
            if "/" not in str(name):
                here = str(part / name)
                self._tried(partial(self._copied, self._files.get_file, f"{source}/{name}", here))
        (part / MANIFEST).write_bytes(manifest)
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        return True

    def retain(self, kept: Iterable[int], newest: int) -> None:
        """Remove the checkpoints up to the newest that are not kept; each by its manifest first."""
        wanted = set(kept)
        for step in self.steps():
            if step <= newest and step not in wanted:
                self.withdraw(step)
                self._tried(partial(self._remove_all, f"{self._path}/{name_of(step)}"))

    def _copied(self, copy: Callable[..., None], source: str, target: str) -> None:
        copy(source, target, callback=_Progress(self._heard))

    def _heard(self) -> None:
        self._until = time.monotonic() + ANSWER_SECONDS

    def _listed(self) -> list[str]:
        self._files.invalidate_cache()
        try:
            found: list[str] = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return found

    def _read(self, key: str) -> bytes | None:
        def read() -> bytes | None:
            self._files.invalidate_cache()
            try:
                found: bytes = self._files.cat_file(key)
            except FileNotFoundError:
                return None
            return found

        return self._tried(read)

    def _remove(self, key: str) -> None:
        try:
            self._files.rm_file(key)
        except FileNotFoundError:
            return

    def _remove_all(self, folder: str) -> None:
        try:
            self._files.rm(folder, recursive=True)
        except FileNotFoundError:
            return

    def _tried(self, work: Callable[[], T]) -> T:
        """Do something until it works, and be `asking` meanwhile; raises TransientError."""
        try:
            return object_store.again(work, self._heard)
        except Exception as error:
            raise self._lost(error) from error
        finally:
            self._until = -math.inf

    def _lost(self, error: Exception) -> TransientError:
        return TransientError(
            f"{self.root} does not answer as it should: {plain(error)}",
            "see its credentials and limits, and run the same command again",
        )
