"""Hashes of input files by content: a copy or a new modification time changes nothing.

A file is read again only if its size or its modification time has changed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.system import files
from regauge.system.errors import DataError
from regauge.system.json_files import find_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.data.sources._files import InputFile

HASH_DIGITS = 32


class ContentHashes:
    """Computes the hashes of files, and keeps those of unchanged files."""

    def __init__(self, caches: Iterable[Path]) -> None:
        """Read the hashes that earlier commands have stored."""
        self._known = {name: entry for path in caches for name, entry in _read(path).items()}
        self._is_changed = False

    def hash_files(self, inputs: Iterable[InputFile]) -> dict[str, str]:
        """Return the hash of each file by its name; a remote file has its size and version."""
        unique = {file.name: file for file in inputs}
        with ThreadPoolExecutor() as pool:
            return dict(zip(unique, pool.map(self._hash_file, unique.values()), strict=True))

    def save(self, path: Path) -> None:
        """Store all known hashes in a folder that exists, if there are new ones."""
        if self._is_changed and path.parent.is_dir():
            files.write_json(path, self._known)
            self._is_changed = False

    def _hash_file(self, file: InputFile) -> str:
        stamp = f"{file.bytes}:{file.version}"
        path = Path(file.name)
        if not path.is_file():
            return stamp
        known = self._known.get(file.name)
        if known is not None and known[0] == stamp:
            return known[1]
        digest = files.sha256(path)[:HASH_DIGITS]
        self._known[file.name] = (stamp, digest)
        self._is_changed = True
        return digest


def _read(path: Path) -> dict[str, tuple[str, str]]:
    """Return the known stamps and hashes; nothing if the file is missing or damaged."""
    try:
        document = find_json(path, "remove it") or {}
    except DataError:
        return {}
    return {
        name: (str(entry[0]), str(entry[1]))
        for name, entry in document.items()
        if isinstance(entry, list) and len(entry) == 2  # noqa: PLR2004 (stamp and hash)
    }
