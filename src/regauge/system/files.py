"""Atomic replacement, hashing and locking of files.

    .<name>.<8 hex digits>.tmp    a file being written, next to the file it replaces

A killed process may leave such a file behind; readers ignore it. Unless `durable` is False, the
content is on the disk before the rename, so the file survives even a machine crash.

A file written in place is opened by `open_in_place`, which does not follow links.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.system import stop_signals, timing
from regauge.system.errors import DataError, SettingsError, TransientError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TEXT = "_text"
"""Suffix of the key that names a number which JSON lacks."""
Stamps = tuple[tuple[str, int, int, int], ...]
"""Path, inode, size and modification time in nanoseconds of some files."""
NON_FINITE = ("NaN", "Infinity", "-Infinity")
TEMPORARY = ".tmp"
"""Suffix of a file being written; the name begins with a dot."""
LOCK = ".lock"
"""Lock file of a folder in which only one process at a time may write."""
STAGING = ".part"
"""Suffix of a folder being filled; the name begins with a dot."""
MIN_FREE_BYTES = 2**20
"""A disk with less free space is full."""
FILE_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""Path type -> name, for anything but regular files."""


def find_state_folder() -> Path:
    """Return this user's state folder, by the XDG Base Directory Specification."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return base / "regauge"


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replace the content of a file; a reader sees either the old or the new content.

    Several processes may write the same file at once; the last one wins.
    """
    with replace_atomically(path, durable=durable) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def find_cache_folder() -> Path:
    """Return the user's cache folder of Regauge: `$XDG_CACHE_HOME/regauge`, by default ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "regauge"


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document with sorted keys, atomically."""
    write_atomic(path, format_json(document, indent=1, sort_keys=True))


def read_stamps(paths: Iterable[Path]) -> Stamps:
    """Return what changes when files are written or replaced; raises OSError for a missing file."""
    statuses = ((path, path.stat()) for path in paths)
    return tuple(
        (str(path), status.st_ino, status.st_size, status.st_mtime_ns) for path, status in statuses
    )


def format_json(document: Any, **options: Any) -> str:
    """Return a document as JSON, with options as for `json.dumps`.

    JSON lacks NaN and infinities. Such a number becomes null, and in an object the key with the
    suffix `_text` has its name: `{"loss": null, "loss_text": "NaN"}`.
    """
    try:
        return json.dumps(document, allow_nan=False, **options)
    except ValueError:
        plain = json.loads(json.dumps(document, **options))
        return json.dumps(_name_non_finite(plain), allow_nan=False, **options)


def _name_non_finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_name_non_finite(item) for item in value]
    if isinstance(value, dict):
        names = {f"{key}{TEXT}": json.dumps(item) for key, item in value.items() if _is_odd(item)}
        return {key: _name_non_finite(item) for key, item in value.items()} | names
    return None if _is_odd(value) else value


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def restore_non_finite(value: Any) -> Any:
    """Return a JSON document with the NaN and infinities that `format_json` has named."""
    if isinstance(value, list):
        return [restore_non_finite(item) for item in value]
    if not isinstance(value, dict):
        return value
    texts = {key: value.get(f"{key}{TEXT}") for key, item in value.items() if item is None}
    numbers = {key: float(text) for key, text in texts.items() if text in NON_FINITE}
    names = {f"{key}{TEXT}" for key in numbers}
    rest = {key: restore_non_finite(item) for key, item in value.items() if key not in names}
    return rest | numbers


def read_content(path: Path, remedy: str, last_bytes: int | None = None) -> bytes | None:
    """Return a file's content, or only its last bytes; None if the file does not exist.

    Raises DataError, with the remedy, if it cannot be read, and PermissionError.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer blocks
        with os.fdopen(handle, "rb") as file:
            kind = _describe_kind(os.fstat(handle).st_mode)
            if kind is None:
                if last_bytes is not None:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
                return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise
    except IsADirectoryError:
        kind = FILE_KINDS[stat.S_IFDIR]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", remedy) from None
    raise DataError(f"{path} cannot be read: it is {kind}, not a file", remedy)


def check_file(path: Path, remedy: str) -> None:
    """Raise DataError if a path is missing or not a regular file; reading a pipe would block."""
    if not path.exists():
        raise DataError(f"{path} is missing", remedy)
    if not path.is_file():
        raise DataError(f"{path} is {_describe_kind(path.stat().st_mode)}, not a file", remedy)


def check_files(folder: Path, remedy: str) -> None:
    """Raise DataError if a folder has a link to nothing, a pipe or a device at any depth."""
    for path in folder.rglob("*"):
        if not path.is_dir():
            check_file(path, remedy)


def check_own_folder(folder: Path) -> None:
    """Raise SettingsError if a folder that Regauge overwrites is a link, or has one at any depth.

    Pipes and devices are refused as well. A missing folder is accepted.
    """
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            with suppress(FileNotFoundError):
                _check_regular(path, path.lstat().st_mode)


def open_in_place(path: str | Path, flags: int) -> int:
    """Open a file that Regauge appends to or truncates; an `opener` for the function `open`.

    Links are not followed, because they may lead to another user's file. Raises SettingsError for
    anything but a regular file.
    """
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        _check_regular(path, os.lstat(path).st_mode)
        raise
    try:
        _check_regular(path, os.fstat(handle).st_mode)
    except SettingsError:
        os.close(handle)
        raise
    return handle


def _check_regular(path: str | Path, mode: int) -> None:
    """Raise SettingsError if a path is not a regular file."""
    if kind := _describe_kind(mode):
        remedy = "remove it, or choose another output folder"
        raise SettingsError(f"{path} is {kind}, not a file", remedy)


def _describe_kind(mode: int) -> str | None:
    """Return a path's kind by its mode; None for a regular file."""
    return FILE_KINDS.get(stat.S_IFMT(mode))


@contextmanager
def replace_atomically(
    path: Path, folder: Path | None = None, *, durable: bool = True
) -> Iterator[Path]:
    """Yield a temporary path, which replaces `path` if the block succeeds.

    The temporary file is in the folder of `path`, or in `folder`, which must be on the same file
    system.
    """
    name = f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}"
    temporary = (folder or path.parent) / name
    try:
        yield temporary
        if durable:
            fsync_paths([temporary])
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def is_temporary(path: Path) -> bool:
    """Return whether a path is the temporary file of an unfinished or interrupted write."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY)


def fsync_paths(paths: Iterable[Path]) -> None:
    """Flush files to the disk: a file's content, a folder's entries."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_csv_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file with a header, as texts by column."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sha256(path: Path) -> str:
    """Return a file's SHA-256 as hexadecimal digits; raises DataError if it is not a file."""
    if path.exists():
        check_file(path, "replace it")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_folder(path: Path, key: str) -> None:
    """Raise SettingsError if a configured folder, or one of its parents, is a file."""
    for folder in (path, *path.parents):
        if folder.exists() and not folder.is_dir():
            raise SettingsError(f"{folder} is a file", f"set {key} to a folder")


def check_free(target: Path) -> None:
    """Raise SettingsError if an output path is taken: it exists and is not an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{target} exists", "choose another target with --to")
    if target.is_mount():
        raise SettingsError(f"{target} is a mount point", "choose a folder inside of it with --to")


def check_absent(paths: Iterable[Path], *, overwrite: bool) -> None:
    """Raise SettingsError if any path exists, unless it may be overwritten."""
    existing = next((path for path in paths if path.exists()), None)
    if existing is not None and not overwrite:
        raise SettingsError(f"{existing} exists", "name another folder, or add --overwrite")


@contextmanager
def stage_output(target: Path) -> Iterator[Path]:
    """Yield a path to write, a file or a folder; it is renamed to `target` if the block succeeds.

    One process at a time may write a target. A killed process leaves its staging folder behind,
    which the next one uses. A link is followed. Raises SettingsError if the target exists and is
    not an empty folder, or if another process writes it, and TransientError if the disk is full.
    """
    target = target.resolve()
    check_free(target)
    staging = target.with_name(f".{target.name}{STAGING}")
    staging.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        staging.mkdir()
    with (
        _own_folder(staging, target),
        stop_signals.call_at_limit(partial(shutil.rmtree, staging, ignore_errors=True)),
    ):
        output = staging / target.name
        try:
            check_free(target)  # another process may have finished since
            _empty_folder(staging)
            yield output
            if target.is_dir():
                target.rmdir()
            output.rename(target)
        except Exception as error:
            if shutil.disk_usage(staging).free < MIN_FREE_BYTES:
                remedy = "free some space, or choose another target with --to"
                raise TransientError(f"the disk of {target} is full", remedy) from error
            raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _own_folder(staging: Path, target: Path) -> Iterator[None]:
    """Hold the lock of a staging folder; raises SettingsError if another process holds it."""
    with try_lock_folder(staging) as is_owner:
        if not is_owner:
            remedy = "wait until it ends, or choose another target with --to"
            raise SettingsError(f"another process writes {target}", remedy)
        yield


@contextmanager
def try_lock_folder(folder: Path) -> Iterator[bool]:
    """Lock a folder for the duration of a block; yield False if it is gone or locked."""
    handle = None
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        is_owner = _try_lock(handle) and os.path.samestat(os.fstat(handle), folder.stat())
    except FileNotFoundError:  # another process has just removed it
        is_owner = False
    try:
        yield is_owner
    finally:
        if handle is not None:
            os.close(handle)


def _empty_folder(folder: Path) -> None:
    """Remove everything in a folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def hold_lock(path: Path, wait_seconds: float | None = 0.0) -> Iterator[int]:
    """Lock a folder, or a file, which is created if missing, exclusively.

    The lock ends with the block or with this process. Yields the handle. Raises BlockingIOError if
    another process holds it for longer than `wait_seconds`; None waits without a limit. Raises
    SettingsError if LOCK is not a regular file.
    """
    is_folder = path.name != LOCK and path.is_dir()
    flags = os.O_RDWR | os.O_CREAT
    handle = os.open(path, os.O_RDONLY) if is_folder else open_in_place(path, flags)
    try:
        _lock(handle, path, wait_seconds)
        yield handle
    finally:
        os.close(handle)


def _lock(handle: int, path: Path, wait_seconds: float | None) -> None:
    if wait_seconds is None:
        fcntl.flock(handle, fcntl.LOCK_EX)
    elif not timing.wait_for(lambda: _try_lock(handle), wait_seconds):
        raise BlockingIOError(f"{path} is locked by another process")


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
