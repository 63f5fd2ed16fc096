"""One writer for each output folder.

A lock holds while a run is supervised; a token tells the attempt of today from one that outlived
its supervisor.

    .lock     locked by the supervisor; says which process that is
    .token    of the attempt that may publish checkpoints
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
import uuid
from typing import IO, TYPE_CHECKING, Self

from regauge.checkpoint.layout import write_text
from regauge.errors import PreemptedError, SettingsError

if TYPE_CHECKING:
    from pathlib import Path

LOCK, TOKEN = ".lock", ".token"
LOOK_SECONDS = 0.1


class Owner:
    """The right to write an output folder, for as long as the block lasts.

    Raises SettingsError where another process has it for longer than `wait_seconds`. A folder that
    the run never came to write in is gone afterwards.
    """

    def __init__(self, folder: Path, wait_seconds: float = 0.0) -> None:
        self._folder = folder
        self._wait_seconds = wait_seconds
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = (self._folder / LOCK).open("a+")
        if not self._locked(self._file):
            self._file.seek(0)
            who = self._file.read().strip() or "another process"
            self._file.close()
            raise SettingsError(
                f"{self._folder} is being written by {who}",
                "wait for its end, stop it, or name another output.folder",
            )
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
        self._file.flush()
        return self

    def _locked(self, file: IO[str]) -> bool:
        until = time.monotonic() + self._wait_seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
                time.sleep(LOOK_SECONDS)
            else:
                return True

    def __exit__(self, *_: object) -> None:
        (self._folder / TOKEN).unlink(missing_ok=True)
        if [path.name for path in self._folder.iterdir()] == [LOCK]:
            (self._folder / LOCK).unlink()
            self._folder.rmdir()
        if self._file is not None:
            self._file.close()

    def admit(self) -> str:
        """Give a new attempt the right to publish, taken from every other; return its token."""
        token = uuid.uuid4().hex
        write_text(self._folder / TOKEN, token)
        return token


def holds(folder: Path, token: str) -> bool:
    """Return whether an attempt still has the right to publish."""
    try:
        return (folder / TOKEN).read_text().strip() == token
    except OSError:
        return False


def check(folder: Path, token: str) -> None:
    """Raise PreemptedError where another attempt has taken this one's place."""
    if not holds(folder, token):
        raise PreemptedError(
            f"another attempt writes {folder} now: nothing was published", "let it go on"
        )
