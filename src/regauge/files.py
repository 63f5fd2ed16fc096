"""Files that are replaced as a whole, hashed and locked.

    .<name>.<8 hex digits>.tmp    a file that is being written, beside the one that it replaces

A process that is killed may leave such a file behind; nothing reads it. Unless `durable` is False,
the content is on the disk before the rename: a name then holds the old content or the new one after
a crash of the machine, too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from regauge import timing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

TEMPORARY = ".tmp"
"""End of the name of a file that is being written; it begins with a dot."""
LOCK = ".lock"
"""The lock file of a folder in which one process at a time may work."""
LOCK_POLL_SECONDS = 0.1


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replace a file as a whole: a reader sees the old content or the new one.

    Several processes may write the same file at once; the content of the last one stays.
    """
    with replacing(path, durable=durable) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document as `write_atomic` does, with sorted keys."""
    write_atomic(path, json.dumps(document, indent=1, sort_keys=True))


@contextmanager
def replacing(path: Path, folder: Path | None = None, *, durable: bool = True) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `path` if the block ends well.

    The temporary file lies beside `path`, or in `folder`, which must be on the same file system.
    """
    name = f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}"
    temporary = (folder or path.parent) / name
    try:
        yield temporary
        if durable:
            flush([temporary])
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def is_temporary(path: Path) -> bool:
    """Return whether a path has the name of a file that is being written, or never was finished."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY)


def flush(paths: Iterable[Path]) -> None:
    """Wait until the contents of files are on the disk; of folders, the names in them."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path, wait_seconds: float | None = 0.0) -> Iterator[None]:
    """Hold the exclusive lock of a file, made if it is missing, or of a folder.

    The lock ends with the block, or with this process however it ends. If another process holds it
    for longer than `wait_seconds`, BlockingIOError is raised; None waits without a limit.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    handle = os.open(path, flags, 0o666)
    try:
        _lock(handle, path, wait_seconds)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, path: Path, wait_seconds: float | None) -> None:
    if wait_seconds is None:
        fcntl.flock(handle, fcntl.LOCK_EX)
    elif not timing.wait_for(
        lambda: _try_lock(handle), wait_seconds, poll_seconds=LOCK_POLL_SECONDS
    ):
        raise BlockingIOError(f"{path} is locked by another process")


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
