"""Registry files: a folder, or an S3 prefix.

A registry needs two atomic operations: create a file that must not exist, and replace a file that
must not have changed. A folder uses a hard link, and a lock with a rename. It may be shared by
machines whose file system has locks. S3 uses conditional writes with `If-None-Match` and
`If-Match`.

A failed store request is sent again. A refused write may therefore repeat a write that succeeded:
the stored content then equals the writer's. Registry documents are unique.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from uuid import uuid4

import fsspec
from fsspec.asyn import sync
from pydantic import ConfigDict

from regauge.system import files, object_store
from regauge.system.errors import RegaugeError, SettingsError, TransientError, first_line
from regauge.system.json_files import DocumentShape

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
S3_PROTOCOLS = ("s3", "s3a")
CHUNK_BYTES = 8 << 20
PROBE = ".regauge-probe"
LOCK_SECONDS = 30.0
"""Seconds to wait for another process replacing a pointer."""


class FileHash(DocumentShape):
    model_config = ConfigDict(frozen=True)

    bytes: int
    sha256: str
    """SHA-256 of the content, in hexadecimal."""


class TokenContent(NamedTuple):
    """File content, and a token that changes with it."""

    content: bytes
    token: str


class RegistryStorage(ABC):
    """Files by key; keys are relative paths with `/`."""

    local_folder: Path | None = None
    """The folder on this machine; None for an object store."""

    def __init__(self, address: str, filesystem: Any, path: str) -> None:
        self.address = address
        """Folder or prefix address."""
        self._files = filesystem
        self._path = path.rstrip("/")

    def locate(self, key: str) -> str:
        """Return a file's address."""
        return f"{self.address}/{key}" if key else self.address

    def read(self, key: str) -> bytes | None:
        """Return a file's content, if it exists."""
        stored = self.read_with_token(key)
        return None if stored is None else stored.content

    @abstractmethod
    def read_with_token(self, key: str) -> TokenContent | None:
        """Return a file's content with the token for `replace`, if it exists."""

    @abstractmethod
    def create(self, key: str, content: bytes) -> bool:
        """Write a new file; return False if it exists with other content."""

    @abstractmethod
    def replace(self, key: str, content: bytes, token: str | None) -> bool:
        """Replace a file atomically; return False if it has changed since its token was read.

        Without a token the file must not exist.
        """

    @abstractmethod
    def check_conditions(self) -> None:
        """Raise SettingsError if `create` and `replace` are not atomic here."""

    def list_names(self, key: str) -> list[str]:
        """Return the sorted names of files and folders in a folder; empty if it is missing."""
        try:
            paths = self._request(self._files.ls, self._resolve(key), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = (path.rstrip("/").rpartition("/")[2] for path in paths)
        return sorted(name for name in names if not name.startswith("."))

    def upload(self, path: Path, key: str) -> None:
        """Copy a local file into the storage; a concurrent reader sees the whole file or none."""
        self._request(self._files.put_file, str(path), self._resolve(key))

    def download(self, key: str, path: Path) -> None:
        """Copy a file to a local path; raises FileNotFoundError if it is missing."""
        self._request(self._files.get_file, self._resolve(key), str(path))

    def hash_file(self, key: str) -> FileHash | None:
        """Return a file's size and hash; None if it is missing."""
        try:
            return self._request(self._hash_file, self._resolve(key))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _hash_file(self, path: str) -> FileHash | None:
        info = self._files.info(path)
        if info["type"] != "file":
            return None
        with self._files.open(path, "rb", block_size=CHUNK_BYTES) as file:
            digest = hashlib.file_digest(file, "sha256")
        return FileHash(bytes=info["size"], sha256=digest.hexdigest())

    def _resolve(self, key: str) -> str:
        return f"{self._path}/{key}" if key else self._path

    def _request(self, action: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call a file system function; raises FileNotFoundError."""
        return action(*arguments, **options)


class FolderStorage(RegistryStorage):
    """Files in a folder."""

    def __init__(self, address: str) -> None:
        self.local_folder = self._folder = Path(address).expanduser()
        super().__init__(address, fsspec.filesystem("file"), str(self._folder.absolute()))

    def read_with_token(self, key: str) -> TokenContent | None:
        content = files.read_content(self._folder / key, "restore it from a copy")
        return (
            None if content is None else TokenContent(content, hashlib.sha256(content).hexdigest())
        )

    def create(self, key: str, content: bytes) -> bool:
        path = self._make_parent(key)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{files.TEMPORARY}")
        try:
            temporary.write_bytes(content)
            files.fsync_paths([temporary])
            os.link(temporary, path)
        except FileExistsError:
            return self.read(key) == content
        finally:
            temporary.unlink(missing_ok=True)
        files.fsync_paths([path.parent])
        return True

    def replace(self, key: str, content: bytes, token: str | None) -> bool:
        path = self._make_parent(key)
        try:
            with files.hold_lock(path.parent / files.LOCK, LOCK_SECONDS):
                current = self.read_with_token(key)
                if (None if current is None else current.token) != token:
                    return current is not None and current.content == content
                files.write_atomic(path, content)
                files.fsync_paths([path.parent])
        except BlockingIOError:
            problem = f"another process has held {path.parent / files.LOCK} for {LOCK_SECONDS:g} s"
            raise TransientError(problem, "end that process, or wait, and try again") from None
        return True

    def check_conditions(self) -> None:
        """Do nothing, because a folder has hard links and locks."""

    def upload(self, path: Path, key: str) -> None:
        target = self._make_parent(key)
        with files.replace_atomically(target) as temporary:
            self._files.put_file(str(path), str(temporary))
        files.fsync_paths([target.parent])

    def _make_parent(self, key: str) -> Path:
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


class S3Storage(RegistryStorage):
    """Keys below an S3 prefix."""

    def __init__(self, address: str) -> None:
        super().__init__(address, *object_store.open_filesystem(address))

    def read_with_token(self, key: str) -> TokenContent | None:
        try:
            return self._request(self._get, self._resolve(key))
        except FileNotFoundError:
            return None

    def create(self, key: str, content: bytes) -> bool:
        return self._put(key, content, IfNoneMatch="*")

    def replace(self, key: str, content: bytes, token: str | None) -> bool:
        condition = {"IfNoneMatch": "*"} if token is None else {"IfMatch": token}
        return self._put(key, content, **condition)

    def check_conditions(self) -> None:
        key = f"{PROBE}-{uuid4().hex}"
        first, second = uuid4().hex.encode(), uuid4().hex.encode()
        try:
            ignores = not self.create(key, first) or self.create(key, second)
            ignores = ignores or self.replace(key, second, '"0"')
        finally:
            self._request(self._files.rm_file, self._resolve(key))
        if ignores:
            problem = f"the store of {self.address} ignores If-Match and If-None-Match"
            raise SettingsError(problem, "use a folder, or a store that has conditional writes")

    def _get(self, path: str) -> TokenContent:
        bucket, key, _ = self._files.split_path(path)
        answer = self._files.call_s3("get_object", Bucket=bucket, Key=key)
        with closing(answer["Body"]) as body:
            return TokenContent(sync(self._files.loop, body.read), answer["ETag"])

    def _put(self, key: str, content: bytes, **condition: str) -> bool:
        """Write a file under a condition; return whether it has this content now."""
        is_done = self._request(self._pipe, self._resolve(key), content, condition)
        return is_done or self.read(key) == content

    def _pipe(self, path: str, content: bytes, condition: dict[str, str]) -> bool:
        """Write a file under a condition; return whether the condition was true."""
        try:
            self._files.pipe_file(path, content, **condition)
        except FileExistsError:
            return False
        except FileNotFoundError:
            if "IfMatch" in condition:  # the file was removed
                return False
            raise
        except OSError as error:
            if error.errno == errno.EINVAL and "condition" in str(error).lower():
                return False
            raise
        return True

    def _request(self, action: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Send a request until it succeeds; raises TransientError and FileNotFoundError."""

        def send() -> T:
            self._files.invalidate_cache()
            return action(*arguments, **options)

        try:
            return object_store.retry(send)
        except (FileNotFoundError, RegaugeError):
            raise
        except Exception as error:
            raise TransientError(
                f"{self.address} does not answer as expected: {first_line(error)}",
                "check its credentials and limits, then run the same command again",
            ) from error


def open_storage(address: str | os.PathLike[str]) -> RegistryStorage:
    """Return the storage at an address: a folder, or `s3://bucket/prefix`.

    Raises SettingsError for another protocol, and if a package is missing.
    """
    text = os.fspath(address).rstrip("/") or "/"
    protocol = object_store.find_protocol(text)
    if protocol == "file":
        return FolderStorage(text.removeprefix("file://"))
    if protocol not in S3_PROTOCOLS:
        problem = f"a registry cannot be stored at {text}: it needs conditional writes"
        raise SettingsError(problem, "name a folder, or an address such as s3://bucket/registry")
    return S3Storage(text)
