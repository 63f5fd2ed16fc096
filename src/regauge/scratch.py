"""A folder for the orders and signs of life of a supervised run, in memory where there is any."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "regauge-run-"
SHARED = Path("/dev/shm")  # noqa: S108 - a folder of its own is made there
ROOM_BYTES = 1 << 20


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a new folder that is gone afterwards; those of supervisors that were killed go, too."""
    roomy = os.access(SHARED, os.W_OK) and shutil.disk_usage(SHARED).free > ROOM_BYTES
    place = SHARED if roomy else Path(tempfile.gettempdir())
    with ExitStack() as stack:
        with _locked(place):
            for folder in place.glob(f"{PREFIX}*"):
                _sweep(folder)
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=place))
            stack.enter_context(_locked(Path(own)))
        yield Path(own)


def _sweep(folder: Path) -> None:
    """Remove a folder, unless somebody has locked it or another user made it."""
    try:
        with _locked(folder, fcntl.LOCK_NB):
            shutil.rmtree(folder)
    except OSError:
        return


@contextmanager
def _locked(folder: Path, how: int = 0) -> Iterator[None]:
    """Hold the lock of a folder for as long as the block lasts, or this process lives."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | how)
        yield
    finally:
        os.close(handle)
