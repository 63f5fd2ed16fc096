"""Files at addresses: listed, and streamed with no more than a few MiB ahead.

Nothing is kept on this machine. A file whose connection breaks is opened again where it was; one
that has changed meanwhile is not.
"""

from __future__ import annotations

import io
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from regauge import object_store
from regauge.errors import DataError, RegaugeError, SettingsError, TransientError, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _typeshed import WriteableBuffer

T = TypeVar("T")
AHEAD_BYTES = 4 * 2**20
"""What is asked for at a time, and held, of a file that is read from its beginning on."""
MARKS = ("ETag", "etag", "blob_id", "md5Hash", "LastModified", "Last-Modified", "mtime", "updated")
"""What stores say of a file that is another after a change, the surest first."""
CREDENTIALS = {
    "s3": "give some that may: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "give some that may: GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "run 'hf auth login', or set HF_TOKEN",
}
WEB = ("http://", "https://")
DENIED = (401, 403)
GONE = (404, 410)


def is_address(name: str) -> bool:
    """Return whether a name is an address, and no path of this machine."""
    return object_store.protocol(name) != "file"


def listed(pattern: str) -> Iterator[tuple[str, int, str]]:
    """Yield the name, the size and the mark of each file that matches, in any order."""
    if "::" in pattern:
        raise DataError(f"'{pattern}' is a file in a file", "unpack it, and name what is in it")
    files, path = _opened(pattern)
    try:
        files.invalidate_cache()
        found = _matches(files, path)
    except Exception as error:  # noqa: BLE001 - every store has errors of its own
        raise explained(pattern, error) from None
    for name, facts in found.items():
        if facts["type"] == "file" and not name.endswith("/"):
            yield files.unstrip_protocol(name), int(facts.get("size") or 0), mark(facts)
        elif name.rstrip("/") == path.rstrip("/"):
            raise DataError(f"{pattern} is a folder", f"name files: {pattern.rstrip('/')}/**")


def serves_parts(name: str) -> bool:
    """Return whether a file can be read from its middle on: some servers only tell all of it."""
    if not name.startswith(WEB):
        return True
    with Remote(name, ahead=False) as file:
        file.seek(1)
        try:
            file.read(1)
        except _IndivisibleError:
            return False
    return True


def explained(address: str, error: Exception) -> RegaugeError:
    """Return what a store's error means for people."""
    if isinstance(error, RegaugeError):
        return error
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    status, said = _status(first), plain(first)
    denied = isinstance(error, PermissionError) or status in DENIED
    if denied or "Credential" in type(first).__name__:
        remedy = CREDENTIALS.get(object_store.protocol(address), "give credentials that may")
        return DataError(f"{address} may not be read: {said}", remedy)
    if isinstance(error, FileNotFoundError) or status in GONE:
        why = "" if said in address else f": {said}"
        return DataError(f"there is no {address}{why}", "correct source.files")
    return TransientError(
        f"{address} does not answer as it should: {said}",
        "see the network, and run the same command again: it continues where it was",
    )


class Remote(io.RawIOBase):
    """A file at an address, read as one of this machine is.

    `ahead` is for reading on and on; without it no byte is asked for that is not read. Raises what
    `explained` returns.
    """

    def __init__(self, name: str, *, ahead: bool) -> None:
        super().__init__()
        self._file: Any = None
        self._name = name
        self._ahead = ahead
        self._files, self._path = _opened(name)
        self._facts: dict[str, Any] | None = None
        self._at = 0
        self._whole = False
        """Whether the server tells all of a file, whatever part of it is asked for."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_CUR:
            offset += self._at
        elif whence == io.SEEK_END:
            offset += self._size()
        self._at = offset
        return offset

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        target = memoryview(buffer).cast("B")
        data: bytes = self._tried(partial(self._read, len(target)))
        target[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._drop()
        super().close()

    def _size(self) -> int:
        size = self._tried(self._current).get("size")
        if size is None:
            raise self._indivisible()
        return int(size)

    def _tried(self, work: Callable[[], T]) -> T:
        try:
            return object_store.again(work)
        except Exception as error:  # noqa: BLE001 - every store has errors of its own
            raise explained(self._name, error) from None

    def _read(self, count: int) -> bytes:
        try:
            found: bytes = self._placed().read(count)
        except Exception as error:
            self._drop()
            if self._whole or not (self._name.startswith(WEB) and isinstance(error, ValueError)):
                raise
            # fsspec's way to say that the server does not tell parts.
            if not self._ahead:
                raise self._indivisible() from None
            self._whole = True
            return self._read(count)
        if not found and count and self._at < ((self._facts or {}).get("size") or 0):
            self._drop()
            raise EOFError(f"it ends at byte {self._at}")
        return found

    def _placed(self) -> Any:
        """Return the open file at the place where reading goes on."""
        if self._file is not None and self._whole and self._file.tell() > self._at:
            self._drop()
        if self._file is None:
            self._current()
            how = {"block_size": AHEAD_BYTES, "cache_type": "readahead" if self._ahead else "none"}
            how = {"block_size": 0} if self._whole else how
            self._file = self._files.open(self._path, "rb", **how)
        while self._whole and self._file.tell() < self._at:
            if not self._file.read(min(AHEAD_BYTES, self._at - self._file.tell())):
                raise EOFError(f"it ends before byte {self._at}")
        if self._file.tell() != self._at:
            self._file.seek(self._at)
        return self._file

    def _current(self) -> dict[str, Any]:
        """Return what the store says of the file; raises DataError where that has changed."""
        facts, before = _info(self._files, self._path), self._facts
        if before and (before.get("size"), mark(before)) != (facts.get("size"), mark(facts)):
            problem = f"{self._name} has changed while it was read"
            raise DataError(problem, "run the same command again")
        self._facts = facts
        return facts

    def _drop(self) -> None:
        if self._file is not None:
            with suppress(Exception):  # it is broken already, or only read
                self._file.close()
            self._file = None

    def _indivisible(self) -> DataError:
        return _IndivisibleError(
            f"{self._name} is on a server that does not tell parts of a file",
            "copy it to this machine first",
        )


class _IndivisibleError(DataError):
    """A server tells files from their beginning on alone."""


def _opened(name: str) -> tuple[Any, str]:
    try:
        return object_store.opened(name)
    except SettingsError as error:
        raise error.within(f"'{name}'") from None


def _matches(files: Any, path: str) -> dict[str, dict[str, Any]]:
    # On the web a question mark begins a query.
    if not set(path) & set("*[" if path.startswith(WEB) else "*[?"):
        return {path: _info(files, path)}
    found: dict[str, dict[str, Any]] = files.glob(path, detail=True)
    if not found:
        _check_place(files, path[: min(path.find(sign) for sign in "*[?" if sign in path)])
    return found


def _check_place(files: Any, before: str) -> None:
    """Raise what a store says where it does not have the place at all, such as the bucket."""
    try:
        files.ls(before.rpartition("/")[0])
    except FileNotFoundError as error:
        if error.__cause__ is not None:
            raise


def _info(files: Any, path: str) -> dict[str, Any]:
    """Return what a store says of a file; on the web, any failure is told as nothing there."""
    try:
        found: dict[str, Any] = files.info(path)
    except FileNotFoundError as error:
        cause = error.__cause__
        if cause is None or _status(cause) in GONE or not path.startswith(WEB):
            raise
        raise cause from None
    return found


def mark(facts: dict[str, Any]) -> str:
    """Return what tells a file from the same after a change; nothing where a store says nothing."""
    return next((str(facts[name]) for name in MARKS if facts.get(name)), "")


def _status(error: BaseException | None) -> int:
    """Return the web's code for what went wrong, 0 where there is none."""
    response = getattr(error, "response", None)
    found = getattr(error, "status", getattr(response, "status_code", 0))
    return found if isinstance(found, int) else 0
