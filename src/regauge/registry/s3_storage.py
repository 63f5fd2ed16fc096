"""A registry in an S3 store, whose writes have the conditions `If-Match` and `If-None-Match`.

A request that fails is sent again. Therefore a refused write may be the repetition of a write that
was done: the content then equals that of the writer. Documents of a registry are unique.
"""

from __future__ import annotations

import errno
import hashlib
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from regauge.registry.registry_storage import FileHash, RegistryStorage, TokenContent
from regauge.system import object_store
from regauge.system.errors import RegaugeError, SettingsError, TransientError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
MAX_READS = 10
"""How often a file is read whose content changes in the meantime."""
CHUNK_BYTES = 8 << 20
PROBE = ".regauge-probe"


class S3Storage(RegistryStorage):
    """The keys below a prefix of an S3 store."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._files, path = object_store.open_filesystem(address)
        self._path = path.rstrip("/")

    @property
    def local_folder(self) -> Path | None:
        return None

    def read(self, key: str) -> bytes | None:
        return self._request(partial(self._read, self._resolve(key)))

    def read_with_token(self, key: str) -> TokenContent | None:
        path = self._resolve(key)
        for _ in range(MAX_READS):
            token = self._request(partial(self._read_tag, path))
            if token is None:
                return None
            content = self._request(partial(self._read, path))
            if content is not None and self._request(partial(self._read_tag, path)) == token:
                return TokenContent(content, token)
        raise TransientError(f"{self.locate(key)} changes while it is read", "try again")

    def create(self, key: str, content: bytes) -> bool:
        return self._write(key, content, IfNoneMatch="*") or self.read(key) == content

    def replace(self, key: str, content: bytes, token: str | None) -> bool:
        condition = {"IfNoneMatch": "*"} if token is None else {"IfMatch": token}
        return self._write(key, content, **condition) or self.read(key) == content

    def list_names(self, key: str) -> list[str]:
        return sorted(self._request(partial(self._list_names, self._resolve(key))))

    def upload(self, path: Path, key: str) -> None:
        self._request(partial(self._files.put_file, str(path), self._resolve(key)))

    def download(self, key: str, path: Path) -> None:
        self._request(partial(self._files.get_file, self._resolve(key), str(path)))

    def hash_file(self, key: str) -> FileHash | None:
        return self._request(partial(self._hash_file, self._resolve(key)))

    def check_conditions(self) -> None:
        key = f"{PROBE}-{uuid4().hex}"
        first, second = uuid4().hex.encode(), uuid4().hex.encode()
        try:
            ignores = not self.create(key, first) or self.create(key, second)
            ignores = ignores or self.replace(key, second, '"0"')
        finally:
            self._request(partial(self._remove, self._resolve(key)))
        if ignores:
            problem = f"the store of {self.address} ignores If-Match and If-None-Match"
            raise SettingsError(problem, "use a folder, or a store that has conditional writes")

    def _resolve(self, key: str) -> str:
        return f"{self._path}/{key}" if key else self._path

    def _write(self, key: str, content: bytes, **condition: str) -> bool:
        """Write a file under a condition; return whether the condition was true."""
        return self._request(partial(self._pipe, self._resolve(key), content, condition))

    def _pipe(self, path: str, content: bytes, condition: dict[str, str]) -> bool:
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

    def _read(self, path: str) -> bytes | None:
        self._files.invalidate_cache()
        try:
            content: bytes = self._files.cat_file(path)
        except FileNotFoundError:
            return None
        return content

    def _read_tag(self, path: str) -> str | None:
        self._files.invalidate_cache()
        try:
            tag: str = self._files.info(path)["ETag"]
        except FileNotFoundError:
            return None
        return tag

    def _list_names(self, path: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            paths: list[str] = self._files.ls(path, detail=False)
        except FileNotFoundError:
            return []
        names = (item.rstrip("/").rpartition("/")[2] for item in paths)
        return [name for name in names if not name.startswith(".")]

    def _hash_file(self, path: str) -> FileHash | None:
        self._files.invalidate_cache()
        try:
            with self._files.open(path, "rb", block_size=CHUNK_BYTES) as file:
                return _hash_stream(file)
        except FileNotFoundError:
            return None

    def _remove(self, path: str) -> None:
        try:
            self._files.rm_file(path)
        except FileNotFoundError:
            return

    def _request(self, action: Callable[[], T]) -> T:
        """Send a request until it succeeds; raises TransientError, and FileNotFoundError."""
        try:
            return object_store.retry(action)
        except (FileNotFoundError, RegaugeError):
            raise
        except Exception as error:
            raise TransientError(
                f"{self.address} does not answer as expected: {first_line(error)}",
                "check its credentials and limits, then run the same command again",
            ) from error


def _hash_stream(file: IO[Any]) -> FileHash:
    digest, size = hashlib.sha256(), 0
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
    return FileHash(size, digest.hexdigest())
