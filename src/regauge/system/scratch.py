"""Temporary folders for commands.

    <temporary folder>/regauge-tmp-*    temporary files of a command, its processes and libraries
    <shared memory>/regauge-run-*       attempt specs, heartbeats and exit statuses of a run
    <shared memory>/regauge-tmp-*       empty; owns the semaphores named after it
    <shared memory>/sem.regauge-tmp-*   semaphores of multiprocessing

A command removes its folders at the end, even after a stop signal. It holds their locks until then.
A folder without a lock does not have a living owner: the same user's next command removes it.
"""

from __future__ import annotations

import getpass
import multiprocessing
import os
import re
import shutil
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.system import processes, stop_signals
from regauge.system.files import try_lock_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX, COMMAND_PREFIX = "regauge-run-", "regauge-tmp-"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only a new, private folder in it is used
MIN_FREE_BYTES = 1 << 20
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable with the cache of torch's compiler, which outlives a command."""


@contextmanager
def create_scratch_folder() -> Iterator[Path]:
    """Yield a new folder, in shared memory if possible, and remove it after the block."""
    has_shared_memory = (
        os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > MIN_FREE_BYTES
    )
    parent = SHARED_MEMORY if has_shared_memory else Path(tempfile.gettempdir())
    _remove_abandoned(parent, PREFIX)
    with ExitStack() as stack:
        yield _create_folder(parent, PREFIX, stack)


@contextmanager
def use_command_folder() -> Iterator[None]:
    """Write this process's and its children's temporary files to one new folder.

    Folders of ended commands are removed first. A process in a supervised run uses the supervisor's
    folder. If the folder cannot be created, the block runs without one.
    """
    with ExitStack() as stack:
        if not processes.is_supervised():
            with suppress(OSError):
                parent = Path(tempfile.gettempdir())
                _remove_abandoned(parent, COMMAND_PREFIX)
                _redirect_temporary_files(_create_folder(parent, COMMAND_PREFIX, stack), parent)
            with suppress(OSError):
                _remove_abandoned(SHARED_MEMORY, PREFIX)
                _remove_abandoned(SHARED_MEMORY, COMMAND_PREFIX)
                _name_semaphores(_create_folder(SHARED_MEMORY, COMMAND_PREFIX, stack))
        yield


def is_default_cache(name: str, value: str) -> bool:
    """Return whether a variable only keeps Inductor's cache out of a command's folder."""
    return name == INDUCTOR_CACHE and Path(value).name == _name_inductor_cache()


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove this user's unlocked folders."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                with try_lock_folder(folder) as is_abandoned:
                    if is_abandoned:
                        _remove_folder(folder)


def _create_folder(parent: Path, prefix: str, stack: ExitStack) -> Path:
    """Return a new, locked folder, which is removed with the stack or at a stop signal.

    Another command may remove it as abandoned before it is locked; then the next one is created.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with ExitStack() as attempt:
            if attempt.enter_context(try_lock_folder(folder)):
                attempt.callback(shutil.rmtree, folder, ignore_errors=True)
                attempt.enter_context(stop_signals.call_at_limit(partial(_remove_folder, folder)))
                stack.push(attempt.pop_all())
                return folder


def _remove_folder(folder: Path) -> None:
    """Remove a folder, and the semaphores named after it."""
    for semaphore in folder.parent.glob(f"sem.{folder.name}-*"):
        semaphore.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _name_semaphores(folder: Path) -> None:
    """Name semaphores after a folder; multiprocessing lacks a public interface for it."""
    vars(multiprocessing.current_process())["_config"]["semprefix"] = f"/{folder.name}"


def _redirect_temporary_files(folder: Path, parent: Path) -> None:
    """Let libraries write temporary files to a folder, and files that outlive it where they did."""
    os.environ.setdefault(INDUCTOR_CACHE, str(parent / _name_inductor_cache()))
    os.environ.setdefault("RAY_TMPDIR", str(parent))
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None


def _name_inductor_cache() -> str:
    """Return the name of Inductor's cache in the temporary folder (its `default_cache_dir`)."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)
