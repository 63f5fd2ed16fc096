"""One writer per output folder.

The lock is held while a run is supervised. The token separates the current attempt from an earlier
one that outlived its supervisor.

    .lock     locked by the supervisor; contains the process that holds it
    .token    token for the attempt that may publish checkpoints
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from regauge.config.output_files import ATTEMPT_TOKEN
from regauge.system.errors import DataError, PreemptedError, SettingsError
from regauge.system.files import LOCK, hold_lock, read_content, write_atomic
from regauge.system.processes import STOPPED_STATES, inspect_process

MAX_OWNER_BYTES = 200
LOCKS = Path("/proc/locks")
_OWNER = re.compile(r"process (\d+) of (\S+)")

FileId = tuple[int, int]


class FolderLock:
    """The exclusive right to write an output folder within a block.

    Raises SettingsError if another process holds it for longer than `wait_seconds`. If the run did
    not write to the folder, it is removed at the end.
    """

    def __init__(self, folder: Path, wait_seconds: float = 0.0) -> None:
        self._folder = folder
        self._wait_seconds = wait_seconds
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{self._folder} cannot be created: {error.strerror}"
            raise SettingsError(problem, "set another output.folder") from None
        file = self._folder / LOCK
        try:
            handle = self._lock.enter_context(hold_lock(file, self._wait_seconds))
        except BlockingIOError:
            owner = _read_owner(self._folder) or "another process"
            raise SettingsError(
                f"{self._folder} is being written by {owner}",
                "wait until it ends, stop it, or set another output.folder",
            ) from None
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} of {socket.gethostname()}\n".encode())
        return self

    def __exit__(self, *_: object) -> None:
        (self._folder / ATTEMPT_TOKEN).unlink(missing_ok=True)
        if [path.name for path in self._folder.iterdir()] == [LOCK]:
            (self._folder / LOCK).unlink()
            self._folder.rmdir()
        self._lock.close()

    def issue_token(self) -> str:
        """Give a new attempt the right to publish, and withdraw all earlier tokens; return it."""
        token = uuid.uuid4().hex
        write_atomic(self._folder / ATTEMPT_TOKEN, f"{token}\n")
        return token


def _read_owner(folder: Path) -> str:
    """Return the process named in the lock file; empty if none is."""
    content = read_content(folder / LOCK, "remove it") or b""
    return content[:MAX_OWNER_BYTES].decode(errors="replace").strip()


def read_lock_owner(folder: Path) -> str:
    """Return the host whose process locked a folder last; empty if unknown."""
    return _parse_owner(folder)[1]


def is_owner_stopped(folder: Path) -> bool:
    """Return whether a signal has stopped the local process that holds the lock."""
    return inspect_process(_parse_owner(folder)[0]).state in STOPPED_STATES


def _parse_owner(folder: Path) -> tuple[int, str]:
    """Return the process and the host in a lock file; 0 and "" without them."""
    try:
        match = _OWNER.match(_read_owner(folder))
    except (DataError, OSError):
        match = None
    return (int(match[1]), match[2]) if match else (0, "")


def list_held_locks() -> frozenset[FileId]:
    """Return the files locked by local processes, as Linux lists them.

    It does not try a lock, because that would hold it for a moment. Empty on other systems.
    """
    try:
        lines = LOCKS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(filter(None, map(_parse_lock, lines)))


def _parse_lock(line: str) -> FileId | None:
    """Return the file in a /proc/locks line, such as `1: FLOCK ADVISORY WRITE 9 08:01:123 …`."""
    fields = line.split()
    if "->" in fields or len(fields) < 6 or fields[5].count(":") != 2:  # noqa: PLR2004  (a waiter)
        return None
    major, minor, inode = fields[5].split(":")
    return os.makedev(int(major, 16), int(minor, 16)), int(inode)


def find_file_id(path: Path) -> FileId | None:
    """Return a file's device and inode; None if it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def is_current(folder: Path, token: str) -> bool:
    """Return whether a token still gives the right to publish."""
    try:
        content = read_content(folder / ATTEMPT_TOKEN, "remove it")
    except DataError:
        return False
    return content is not None and content.strip() == token.encode()


def check_token(folder: Path, token: str) -> None:
    """Raise PreemptedError if a newer attempt has the right to publish."""
    if not is_current(folder, token):
        raise PreemptedError(
            f"another attempt writes {folder} now; this one published nothing",
            "wait until that attempt ends",
        )
