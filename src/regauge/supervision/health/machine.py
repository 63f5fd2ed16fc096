"""Checks of storage, object store and shared memory; no torch, and less than a second."""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING
from uuid import uuid4

from regauge.run_folders.remote_checkpoints import RemoteCheckpoints
from regauge.supervision.health.findings import Finding
from regauge.system import scratch
from regauge.system.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIN_FREE_DISK_BYTES = 1 << 26
WRITTEN_BYTES = 1 << 22
MAX_WRITE_SECONDS = 10.0
PROBE = ".regauge-doctor"


def check_machine(folder: Path, root: str | None = None) -> Iterator[Finding]:
    """Yield findings about an output folder, an object store and shared memory."""
    yield _check_storage(folder)
    yield _check_free_space(folder)
    if root is not None:
        yield _check_object_store(root)
    if scratch.SHARED_MEMORY.is_dir():
        yield _check_shared_memory()


def _check_storage(folder: Path) -> Finding:
    """Write, flush and rename a file as a checkpoint does, then remove it."""
    parent = find_existing_parent(folder)
    file = parent / f"{PROBE}-{uuid4().hex}"  # other nodes may check at the same time
    began = time.monotonic()
    try:
        write_atomic(file, os.urandom(WRITTEN_BYTES))
    except OSError as error:
        return Finding.bad("storage", str(parent), f"cannot be written: {error.strerror}")
    finally:
        _remove(file)
    seconds = time.monotonic() - began
    numbers = {"bytes_per_second": WRITTEN_BYTES / seconds}
    value = f"{WRITTEN_BYTES / seconds / 1e6:,.0f} MB/s"
    if seconds > MAX_WRITE_SECONDS:
        return Finding.bad("storage", str(parent), f"4 MiB took {seconds:.0f} s", value)
    return Finding("storage", str(parent), value, numbers=numbers)


def _check_object_store(root: str) -> Finding:
    """Write a key to an object store, then remove it."""
    began = time.monotonic()
    problem = RemoteCheckpoints(root).find_problem()
    if problem:
        return Finding.bad("object store", root, f"cannot be written: {problem}")
    seconds = time.monotonic() - began
    return Finding(
        "object store", root, f"wrote a key in {seconds:.2f} s", numbers={"seconds": seconds}
    )


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _check_free_space(folder: Path) -> Finding:
    parent, free = str(find_existing_parent(folder)), free_bytes(folder)
    value = f"{free / 1e9:,.1f} GB free"
    if free < MIN_FREE_DISK_BYTES:
        return Finding.bad("free space", parent, "no space for a checkpoint", value)
    return Finding("free space", parent, value, numbers={"bytes": free})


def _check_shared_memory() -> Finding:
    """Report the free shared memory; always good, because a run works without it."""
    free = shutil.disk_usage(scratch.SHARED_MEMORY).free
    value = f"{free / 1e6:,.0f} MB free"
    if free < scratch.MIN_FREE_BYTES:
        value += "; heartbeats are written to disk"
    return Finding("shared memory", str(scratch.SHARED_MEMORY), value, numbers={"bytes": free})


def free_bytes(folder: Path) -> int:
    """Return the free disk space for a folder, which need not exist yet."""
    return shutil.disk_usage(find_existing_parent(folder)).free


def find_existing_parent(folder: Path) -> Path:
    """Return the folder itself or the nearest existing parent."""
    parent = folder.resolve()
    while not parent.is_dir():
        parent = parent.parent
    return parent
