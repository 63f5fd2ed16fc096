"""Files at URLs: listed, and streamed with a few MiB of read-ahead.

Nothing is stored on this machine. If a connection breaks, the file is opened again at the same
offset. If the file has changed since, reading fails.
"""

from __future__ import annotations

import io
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from regauge.system import object_store
from regauge.system.errors import DataError, RegaugeError, SettingsError, TransientError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _typeshed import WriteableBuffer

T = TypeVar("T")
READ_AHEAD_BYTES = 4 * 2**20
"""Bytes per request, and the size of the buffer, if a file is read sequentially."""
VERSION_KEYS = (
    "ETag",
    "etag",
    "blob_id",
    "md5Hash",
    "LastModified",
    "Last-Modified",
    "mtime",
    "updated",
)
"""Keys of the metadata of stores that change with the content of a file, most reliable first."""
CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "run 'hf auth login', or set HF_TOKEN",
}
"""Remedies for denied access, by protocol."""
HTTP_PREFIXES = ("http://", "https://")
DENIED_STATUSES = (401, 403)
MISSING_STATUSES = (404, 410)


def is_url(name: str) -> bool:
    """Return whether a name is a URL and not a local path."""
    return object_store.find_protocol(name) != "file"


def list_matches(pattern: str) -> Iterator[tuple[str, int, str]]:
    """Yield the name, the size and the version of each file that matches, in any order."""
    if "::" in pattern:
        raise DataError(
            f"'{pattern}' is a file within an archive",
            "unpack it and set source.files to its files",
        )
    filesystem, path = _open_filesystem(pattern)
    try:
        filesystem.invalidate_cache()
        matches = _match(filesystem, path)
    except Exception as error:  # noqa: BLE001 - every store has its own errors
        raise translate_error(pattern, error) from None
    for name, metadata in matches.items():
        if metadata["type"] == "file" and not name.endswith("/"):
            url = filesystem.unstrip_protocol(name)
            yield url, int(metadata.get("size") or 0), find_version(metadata)
        elif name.rstrip("/") == path.rstrip("/"):
            remedy = f"set source.files to {pattern.rstrip('/')}/**"
            raise DataError(f"{pattern} is a folder", remedy)


def supports_ranges(name: str) -> bool:
    """Return whether a part of a file can be read; some servers only send whole files."""
    if not name.startswith(HTTP_PREFIXES):
        return True
    with RemoteFile(name, read_ahead=False) as file:
        file.seek(1)
        try:
            file.read(1)
        except _NoRangesError:
            return False
    return True


def translate_error(url: str, error: Exception) -> RegaugeError:
    """Return the error of a store as an error of Regauge, with a remedy."""
    if isinstance(error, RegaugeError):
        return error
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    status, message = _find_status(cause), first_line(cause)
    is_denied = isinstance(error, PermissionError) or status in DENIED_STATUSES
    if is_denied or "Credential" in type(cause).__name__:
        remedy = CREDENTIALS.get(object_store.find_protocol(url), "provide credentials")
        return DataError(f"access to {url} denied: {message}", remedy)
    if isinstance(error, FileNotFoundError) or status in MISSING_STATUSES:
        detail = "" if message in url else f": {message}"
        return DataError(f"no file {url}{detail}", "correct source.files")
    return TransientError(
        f"cannot read {url}: {message}",
        "check the network and run the same command again; it resumes",
    )


class RemoteFile(io.RawIOBase):
    """A file at a URL with the interface of a local file.

    `read_ahead` is for sequential reading; without it, only the bytes that are read are requested.
    Raises the errors of `translate_error`.
    """

    def __init__(self, name: str, *, read_ahead: bool) -> None:
        super().__init__()
        self._file: Any = None
        self._name = name
        self._read_ahead = read_ahead
        self._filesystem, self._path = _open_filesystem(name)
        self._metadata: dict[str, Any] | None = None
        self._offset = 0
        self._is_sequential = False
        """Whether the server sends the whole file for any requested part."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_CUR:
            offset += self._offset
        elif whence == io.SEEK_END:
            offset += self._size()
        self._offset = offset
        return offset

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        target = memoryview(buffer).cast("B")
        data: bytes = self._retry(partial(self._read, len(target)))
        target[: len(data)] = data
        self._offset += len(data)
        return len(data)

    def close(self) -> None:
        self._close_file()
        super().close()

    def _size(self) -> int:
        size = self._retry(self._read_metadata).get("size")
        if size is None:
            raise self._no_ranges_error()
        return int(size)

    def _retry(self, action: Callable[[], T]) -> T:
        try:
            return object_store.retry(action)
        except Exception as error:  # noqa: BLE001 - every store has its own errors
            raise translate_error(self._name, error) from None

    def _read(self, count: int) -> bytes:
        try:
            data: bytes = self._seek_file().read(count)
        except Exception as error:
            self._close_file()
            if self._is_sequential or not (
                self._name.startswith(HTTP_PREFIXES) and isinstance(error, ValueError)
            ):
                raise
            # fsspec raises ValueError if the server does not support ranges.
            if not self._read_ahead:
                raise self._no_ranges_error() from None
            self._is_sequential = True
            return self._read(count)
        if not data and count and self._offset < ((self._metadata or {}).get("size") or 0):
            self._close_file()
            raise EOFError(f"it ends at byte {self._offset}")
        return data

    def _seek_file(self) -> Any:
        """Return the open file at the current offset."""
        if self._file is not None and self._is_sequential and self._file.tell() > self._offset:
            self._close_file()
        if self._file is None:
            self._read_metadata()
            options = {
                "block_size": READ_AHEAD_BYTES,
                "cache_type": "readahead" if self._read_ahead else "none",
            }
            options = {"block_size": 0} if self._is_sequential else options
            self._file = self._filesystem.open(self._path, "rb", **options)
        while self._is_sequential and self._file.tell() < self._offset:
            if not self._file.read(min(READ_AHEAD_BYTES, self._offset - self._file.tell())):
                raise EOFError(f"it ends before byte {self._offset}")
        if self._file.tell() != self._offset:
            self._file.seek(self._offset)
        return self._file

    def _read_metadata(self) -> dict[str, Any]:
        """Return the metadata of the file; raises DataError if it has changed."""
        metadata, earlier = _fetch_metadata(self._filesystem, self._path), self._metadata
        if earlier and _identify(earlier) != _identify(metadata):
            problem = f"{self._name} has changed while it was read"
            raise DataError(problem, "run the same command again")
        self._metadata = metadata
        return metadata

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(Exception):  # the connection may be broken
                self._file.close()
            self._file = None

    def _no_ranges_error(self) -> DataError:
        return _NoRangesError(
            f"the server of {self._name} does not support range requests",
            "copy the file to this machine and set source.files to it",
        )


class _NoRangesError(DataError):
    """A server sends only whole files."""


def _open_filesystem(name: str) -> tuple[Any, str]:
    try:
        return object_store.open_filesystem(name)
    except SettingsError as error:
        raise error.add_location(f"'{name}'") from None


def _match(filesystem: Any, path: str) -> dict[str, dict[str, Any]]:
    # In an HTTP URL, a question mark starts a query.
    if not set(path) & set("*[" if path.startswith(HTTP_PREFIXES) else "*[?"):
        return {path: _fetch_metadata(filesystem, path)}
    matches: dict[str, dict[str, Any]] = filesystem.glob(path, detail=True)
    if not matches:
        _check_folder(
            filesystem,
            path[: min(path.find(character) for character in "*[?" if character in path)],
        )
    return matches


def _check_folder(filesystem: Any, prefix: str) -> None:
    """Raise the error of a store that lacks the folder of a pattern, or its bucket."""
    try:
        filesystem.ls(prefix.rpartition("/")[0])
    except FileNotFoundError as error:
        if error.__cause__ is not None:
            raise


def _fetch_metadata(filesystem: Any, path: str) -> dict[str, Any]:
    """Return the metadata of a file; fsspec reports any HTTP failure as a missing file."""
    try:
        metadata: dict[str, Any] = filesystem.info(path)
    except FileNotFoundError as error:
        cause = error.__cause__
        if (
            cause is None
            or _find_status(cause) in MISSING_STATUSES
            or not path.startswith(HTTP_PREFIXES)
        ):
            raise
        raise cause from None
    return metadata


def find_version(metadata: dict[str, Any]) -> str:
    """Return the version of a file from its metadata; empty if the store has none."""
    return next((str(metadata[name]) for name in VERSION_KEYS if metadata.get(name)), "")


def _identify(metadata: dict[str, Any]) -> tuple[Any, str]:
    return metadata.get("size"), find_version(metadata)


def _find_status(error: BaseException | None) -> int:
    """Return the HTTP status of an error, or 0."""
    response = getattr(error, "response", None)
    status = getattr(error, "status", getattr(response, "status_code", 0))
    return status if isinstance(status, int) else 0
