"""A registry in a folder, which may be shared by machines whose file system has locks."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from pathlib import Path

from regauge.registry.registry_storage import FileHash, RegistryStorage, TokenContent
from regauge.system import files
from regauge.system.errors import TransientError

LOCK_SECONDS = 30.0
"""Time to wait for another process that replaces a pointer."""
REMEDY = "restore it from a copy"


class FolderStorage(RegistryStorage):
    """The files of a folder."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._folder = Path(address).expanduser()

    @property
    def local_folder(self) -> Path:
        return self._folder

    def check_conditions(self) -> None:
        """Do nothing, because a folder has hard links and locks."""

    def read(self, key: str) -> bytes | None:
        return files.read_content(self._folder / key, REMEDY)

    def read_with_token(self, key: str) -> TokenContent | None:
        content = self.read(key)
        return None if content is None else TokenContent(content, _compute_token(content))

    def create(self, key: str, content: bytes) -> bool:
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
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
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with files.hold_lock(path.parent / files.LOCK, LOCK_SECONDS):
                current = self.read(key)
                if (None if current is None else _compute_token(current)) != token:
                    return current == content
                files.write_atomic(path, content)
                files.fsync_paths([path.parent])
        except BlockingIOError:
            problem = f"another process holds {path.parent / files.LOCK} for {LOCK_SECONDS:g} s"
            raise TransientError(problem, "end that process, or wait, and try again") from None
        return True

    def list_names(self, key: str) -> list[str]:
        folder = self._folder / key
        if not folder.is_dir():
            return []
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))

    def upload(self, path: Path, key: str) -> None:
        target = self._folder / key
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.replace_atomically(target) as temporary:
            shutil.copyfile(path, temporary)
        files.fsync_paths([target.parent])

    def download(self, key: str, path: Path) -> None:
        shutil.copyfile(self._folder / key, path)

    def hash_file(self, key: str) -> FileHash | None:
        path = self._folder / key
        if not path.is_file():
            return None
        return FileHash(path.stat().st_size, files.sha256(path))


def _compute_token(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
