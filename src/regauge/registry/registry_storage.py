"""The files of a registry: a folder, or a prefix of an S3 store.

A registry needs two operations in one step: create a file that must not exist, and replace a file
that must not have changed. A folder uses a hard link, and a lock with a rename. S3 uses the
conditions `If-None-Match` and `If-Match` of a write.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

from regauge.system.errors import SettingsError
from regauge.system.object_store import find_protocol

S3_PROTOCOLS = ("s3", "s3a")


class FileHash(NamedTuple):
    """The size and hash of a file."""

    bytes: int
    """Size in bytes."""
    sha256: str
    """SHA-256 of the content, in hexadecimal."""


class TokenContent(NamedTuple):
    """The content of a file, with a token that changes with the content."""

    content: bytes
    token: str


class RegistryStorage(ABC):
    """Files by their keys, which are relative paths with `/`."""

    def __init__(self, address: str) -> None:
        self.address = address
        """The address of the folder or of the prefix."""

    @abstractmethod
    def check_conditions(self) -> None:
        """Raise SettingsError if `create` and `replace` are not atomic here."""

    def locate(self, key: str) -> str:
        """Return the address of a file."""
        return f"{self.address}/{key}" if key else self.address

    @property
    @abstractmethod
    def local_folder(self) -> Path | None:
        """The folder on this machine; None for an object store."""

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """Return the content of a file; None if there is none."""

    @abstractmethod
    def read_with_token(self, key: str) -> TokenContent | None:
        """Return the content of a file with the token for `replace`; None if there is none."""

    @abstractmethod
    def create(self, key: str, content: bytes) -> bool:
        """Write a file that must not exist; return False if it exists with another content."""

    @abstractmethod
    def replace(self, key: str, content: bytes, token: str | None) -> bool:
        """Replace a file in one step; return False if it has changed since its token was read.

        Without a token the file must not exist.
        """

    @abstractmethod
    def list_names(self, key: str) -> list[str]:
        """Return the names of the files and folders in a folder, sorted; none if it is missing."""

    @abstractmethod
    def upload(self, path: Path, key: str) -> None:
        """Copy a local file into the storage; a further reader sees the whole file or none."""

    @abstractmethod
    def download(self, key: str, path: Path) -> None:
        """Copy a file to a local path; raises FileNotFoundError if it is missing."""

    @abstractmethod
    def hash_file(self, key: str) -> FileHash | None:
        """Return the size and hash of a file; None if it is missing."""


def open_storage(address: str | os.PathLike[str]) -> RegistryStorage:
    """Return the storage at an address: a folder, or `s3://bucket/prefix`.

    Raises SettingsError for another protocol, and if a package is missing.
    """
    text = os.fspath(address).rstrip("/") or "/"
    protocol = find_protocol(text)
    if protocol == "file":
        from regauge.registry.folder_storage import FolderStorage

        return FolderStorage(text.removeprefix("file://"))
    if protocol not in S3_PROTOCOLS:
        problem = f"a registry cannot be stored at {text}: it needs conditional writes"
        raise SettingsError(problem, "name a folder, or an address such as s3://bucket/registry")
    from regauge.registry.s3_storage import S3Storage

    return S3Storage(text)
