"""Checkpoints in an object store: the same files under the same names, the manifest last.

    <root>/step-00000100/*.safetensors, state.json    uploaded by the process that hashed them
    <root>/step-00000100/manifest.json                without it the folder is not a checkpoint
    <root>/LATEST                                     the newest, because a listing may be outdated

Every process first writes its files to a local folder. This module does not import torch.
"""

from __future__ import annotations

import math
import shutil
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

import fsspec

from regauge.run_folders.checkpoint_files import (
    LATEST,
    MANIFEST,
    ManifestShape,
    checkpoint_name,
    parse_step,
    staging_folder,
)
from regauge.system import object_store
from regauge.system.errors import SettingsError, TransientError, first_line
from regauge.system.json_files import find_mismatch, parse_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

T = TypeVar("T")
ANSWER_SECONDS = 120.0
"""How long a request may make no progress, including retries inside its client.

s3fs tries five times, with up to 20 s without an answer and pauses of 1.9 s in all.
"""
PROBE = ".regauge-probe"


class _Progress(fsspec.Callback):  # type: ignore[misc]
    """Calls a function whenever part of a file has been transferred."""

    def __init__(self, on_progress: Callable[[], None]) -> None:
        super().__init__()
        self._on_progress = on_progress

    def relative_update(self, inc: int = 1) -> None:
        """Count transferred bytes."""
        super().relative_update(inc)
        self._on_progress()


class RemoteCheckpoints:
    """A run's checkpoints in an object store supported by fsspec, such as `s3://bucket/run`.

    One thread at a time may use it; `is_waiting` may be read from another one. Raises SettingsError
    if the root cannot be opened.
    """

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._deadline = -math.inf
        try:
            self._files, path = object_store.open_filesystem(self.root)
        except SettingsError as error:
            raise error.add_location(f"output.checkpoint.remote = '{root}'") from None
        self._path = path.rstrip("/")

    @property
    def is_waiting(self) -> bool:
        """Whether a request is in progress and within its time limit: slow, but not hanging."""
        return time.monotonic() < self._deadline

    def find_problem(self) -> str | None:
        """Write and remove a small key; return the problem, or None."""
        key = f"{self._path}/{PROBE}-{uuid4().hex}"
        try:
            self._files.pipe_file(key, b"regauge")
            self._files.rm_file(key)
        except Exception as error:  # noqa: BLE001 - every store has its own errors
            return first_line(error)
        return None

    def upload(self, staging: Path, step: int, names: Iterable[str]) -> None:
        """Upload files from a staging folder, one after the other."""
        for name in names:
            key = f"{self._path}/{checkpoint_name(step)}/{name}"
            self._retry(partial(self._copy, self._files.put_file, str(staging / name), key))

    def withdraw(self, step: int) -> None:
        """Remove the manifest of a step's checkpoint before its files are changed or removed."""
        self._retry(lambda: self._remove(f"{self._path}/{checkpoint_name(step)}/{MANIFEST}"))

    def commit(self, manifest: Path, step: int) -> None:
        """Upload the manifest, which completes the checkpoint, and then mark it as the newest."""
        key = f"{self._path}/{checkpoint_name(step)}/{MANIFEST}"
        self._retry(lambda: self._files.pipe_file(key, manifest.read_bytes()))
        pointer = f"{self._path}/{LATEST}"
        self._retry(lambda: self._files.pipe_file(pointer, f"{checkpoint_name(step)}\n".encode()))

    def list_steps(self) -> list[int]:
        """Return the steps that may have a checkpoint, newest first: listed, or in LATEST."""
        names = {path.rstrip("/").rpartition("/")[2] for path in self._retry(self._list_paths)}
        pointer = self._read(f"{self._path}/{LATEST}")
        names.add(pointer.decode(errors="replace").strip() if pointer else "")
        numbers = (parse_step(name) for name in names)
        return sorted((number for number in numbers if number is not None), reverse=True)

    def download(self, step: int, root: Path) -> bool:
        """Download a step's checkpoint to a local root; return False if the store lacks it.

        The local checkpoint is replaced once the download is complete. Hashes are not checked here,
        and a file that the store has lost is missing.
        """
        source = f"{self._path}/{checkpoint_name(step)}"
        manifest = self._read(f"{source}/{MANIFEST}")
        if manifest is None:
            return False
        try:
            document = parse_object(manifest)
            names = [] if find_mismatch(document, ManifestShape) else list(document["files"])
        except ValueError:
            names = []
        staging, final = staging_folder(root, step), root / checkpoint_name(step)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        for name in names:
            if "/" not in str(name):
                local = str(staging / name)
                self._retry(partial(self._fetch, f"{source}/{name}", local))
        (staging / MANIFEST).write_bytes(manifest)
        shutil.rmtree(final, ignore_errors=True)
        staging.rename(final)
        return True

    def retain(self, steps: Iterable[int], newest: int) -> None:
        """Remove the checkpoints up to `newest`, except the given steps; their manifests first."""
        retained = set(steps)
        for step in self.list_steps():
            if step <= newest and step not in retained:
                self.withdraw(step)
                self._retry(partial(self._remove_folder, f"{self._path}/{checkpoint_name(step)}"))

    def _copy(self, copy: Callable[..., None], source: str, target: str) -> None:
        copy(source, target, callback=_Progress(self._extend_deadline))

    def _fetch(self, source: str, target: str) -> None:
        """Download a file, if the store has it."""
        with suppress(FileNotFoundError):
            self._copy(self._files.get_file, source, target)

    def _extend_deadline(self) -> None:
        self._deadline = time.monotonic() + ANSWER_SECONDS

    def _list_paths(self) -> list[str]:
        self._files.invalidate_cache()
        try:
            paths: list[str] = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return paths

    def _read(self, key: str) -> bytes | None:
        def read() -> bytes | None:
            self._files.invalidate_cache()
            try:
                content: bytes = self._files.cat_file(key)
            except FileNotFoundError:
                return None
            return content

        return self._retry(read)

    def _remove(self, key: str) -> None:
        try:
            self._files.rm_file(key)
        except FileNotFoundError:
            return

    def _remove_folder(self, folder: str) -> None:
        try:
            self._files.rm(folder, recursive=True)
        except FileNotFoundError:
            return

    def _retry(self, request: Callable[[], T]) -> T:
        """Retry a request until it succeeds; `is_waiting` meanwhile. Raises TransientError."""
        try:
            return object_store.retry(request, self._extend_deadline)
        except Exception as error:
            raise self._build_error(error) from error
        finally:
            self._deadline = -math.inf

    def _build_error(self, error: Exception) -> TransientError:
        return TransientError(
            f"{self.root} does not answer as expected: {first_line(error)}",
            "check its credentials and limits, then run the same command again",
        )
