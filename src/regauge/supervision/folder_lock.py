"""One writer for each output folder.

A lock holds while a run is supervised; a token tells the attempt of today from one that outlived
its supervisor.

    .lock     locked by the supervisor; says which process that is
    .token    of the attempt that may publish checkpoints
"""

from __future__ import annotations

import os
import socket
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from regauge.errors import PreemptedError, SettingsError
from regauge.files import LOCK, locked, write_atomic

if TYPE_CHECKING:
    from pathlib import Path

ATTEMPT_TOKEN = ".token"  # noqa: S105 - the name of a file


class Owner:
    """The right to write an output folder, for as long as the block lasts.

    Raises SettingsError where another process has it for longer than `wait_seconds`. A folder that
    the run never came to write in is gone afterwards.
    """

    def __init__(self, folder: Path, wait_seconds: float = 0.0) -> None:
        self._folder = folder
        self._wait_seconds = wait_seconds
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / LOCK
        try:
            self._lock.enter_context(locked(file, self._wait_seconds))
        except BlockingIOError:
            owner = file.read_text().strip() or "another process"
            raise SettingsError(
                f"{self._folder} is being written by {owner}",
                "wait for its end, stop it, or name another output.folder",
            ) from None
        file.write_text(f"process {os.getpid()} of {socket.gethostname()}\n")
        return self

    def __exit__(self, *_: object) -> None:
        (self._folder / ATTEMPT_TOKEN).unlink(missing_ok=True)
        if [path.name for path in self._folder.iterdir()] == [LOCK]:
            (self._folder / LOCK).unlink()
            self._folder.rmdir()
        self._lock.close()

    def admit(self) -> str:
        """Give a new attempt the right to publish, taken from every other; return its token."""
        token = uuid.uuid4().hex
        write_atomic(self._folder / ATTEMPT_TOKEN, f"{token}\n")
        return token


def holds(folder: Path, token: str) -> bool:
    """Return whether an attempt still has the right to publish."""
    try:
        return (folder / ATTEMPT_TOKEN).read_text().strip() == token
    except OSError:
        return False


def check(folder: Path, token: str) -> None:
    """Raise PreemptedError where another attempt has taken this one's place."""
    if not holds(folder, token):
        raise PreemptedError(
            f"another attempt writes {folder} now: nothing was published", "let it go on"
        )
