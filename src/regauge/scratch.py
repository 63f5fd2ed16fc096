"""The scratch folder of a supervised run, for attempt specs, heartbeats and exit statuses."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.files import hold_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "regauge-run-"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only a new, private folder in it is used
MIN_FREE_BYTES = 1 << 20


@contextmanager
def create_scratch_folder() -> Iterator[Path]:
    """Yield a new folder, in shared memory if possible, and remove it after the block.

    Folders that killed supervisors left behind are removed first.
    """
    has_shared_memory = (
        os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > MIN_FREE_BYTES
    )
    parent = SHARED_MEMORY if has_shared_memory else Path(tempfile.gettempdir())
    with ExitStack() as stack:
        with hold_lock(parent, wait_seconds=None):
            for abandoned in parent.glob(f"{PREFIX}*"):
                _remove_if_abandoned(abandoned)
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent))
            stack.enter_context(hold_lock(Path(name), wait_seconds=None))
        yield Path(name)


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a folder, unless a process has locked it or another user owns it."""
    try:
        with hold_lock(folder):
            shutil.rmtree(folder)
    except OSError:
        return
