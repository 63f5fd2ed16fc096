"""What a run needs of this machine beside its devices; no torch, and less than a second."""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING
from uuid import uuid4

from regauge.checkpoint.remote import Remote
from regauge.files import write_atomic
from regauge.health.findings import Finding
from regauge.scratch import ROOM_BYTES, SHARED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LEAST_FREE_BYTES = 1 << 26
WRITTEN_BYTES = 1 << 22
SLOWEST_SECONDS = 10.0
PROBE = ".regauge-doctor"


def check_machine(folder: Path, root: str | None = None) -> Iterator[Finding]:
    """Yield what is found of an output folder's storage, the object store, and shared memory."""
    yield _storage(folder)
    yield _space(folder)
    if root is not None:
        yield _store(root)
    if SHARED.is_dir():
        yield _shared()


def _storage(folder: Path) -> Finding:
    """Write, flush and rename a file as a checkpoint is, and remove it again."""
    place = existing(folder)
    file = place / f"{PROBE}-{uuid4().hex}"  # other nodes may do this at the same time
    began = time.monotonic()
    try:
        write_atomic(file, os.urandom(WRITTEN_BYTES))
    except OSError as error:
        return Finding.bad("storage", str(place), f"cannot be written: {error.strerror}")
    finally:
        _remove(file)
    seconds = time.monotonic() - began
    value = f"{WRITTEN_BYTES / seconds / 1e6:,.0f} MB/s"
    if seconds > SLOWEST_SECONDS:
        return Finding.bad("storage", str(place), f"4 MiB took {seconds:.0f} s", value)
    return Finding("storage", str(place), value)


def _store(root: str) -> Finding:
    """Write a key to an object store, and remove it."""
    began = time.monotonic()
    problem = Remote(root).check()
    if problem:
        return Finding.bad("object store", root, f"cannot be written: {problem}")
    return Finding("object store", root, f"a key in {time.monotonic() - began:.2f} s")


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _space(folder: Path) -> Finding:
    place, free = str(existing(folder)), free_bytes(folder)
    value = f"{free / 1e9:,.1f} GB free"
    if free < LEAST_FREE_BYTES:
        return Finding.bad("free space", place, "nothing can be saved", value)
    return Finding("free space", place, value)


def _shared() -> Finding:
    """Look at shared memory: a run can do without, so that none of it is no reason not to start."""
    free = shutil.disk_usage(SHARED).free
    value = f"{free / 1e6:,.0f} MB free"
    if free < ROOM_BYTES:
        value += ": signs of life go to the disk"
    return Finding("shared memory", str(SHARED), value)


def free_bytes(folder: Path) -> int:
    """Return how much can be written to a folder, whether or not it exists yet."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """Return the nearest folder above that exists."""
    found = folder.resolve()
    while not found.is_dir():
        found = found.parent
    return found
