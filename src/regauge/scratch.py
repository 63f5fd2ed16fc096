"""A folder for the orders and signs of life of a supervised run, in memory where there is any."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.files import locked

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
        with locked(place, wait_seconds=None):
            for folder in place.glob(f"{PREFIX}*"):
                _sweep(folder)
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=place))
            stack.enter_context(locked(Path(own), wait_seconds=None))
        yield Path(own)


def _sweep(folder: Path) -> None:
    """Remove a folder, unless somebody has locked it or another user made it."""
    try:
        with locked(folder):
            shutil.rmtree(folder)
    except OSError:
        return
