"""Hashes of the data and of the custom code that a stage reads.

Local files are hashed by content, so a copy or a new modification time changes nothing. A file is
read again only if its size or its modification time has changed. Remote files are identified by
their size and version.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import choices, files
from regauge.config import Choice, Settings
from regauge.data.sources import Source
from regauge.data.sources._files import FileSource, InputFile, find_files
from regauge.errors import DataError
from regauge.json_files import find_json

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE = "data_hashes.json"
"""File of known hashes, in the folder of the pipeline."""
HASH_DIGITS = 32

FileHashes = dict[str, str]
"""Hash by name of a file, or of another piece of a source."""


class DataHasher:
    """Computes hashes of files, and keeps those of unchanged files."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / CACHE
        self._known = _read_cache(self._path)
        self._is_changed = False

    def hash_patterns(self, patterns: tuple[str, ...]) -> FileHashes:
        """Return the hash of every file that matches; raises DataError if none matches."""
        return {file.name: self._hash_file(file) for file in find_files(patterns)}

    def hash_source(self, source: Source) -> FileHashes:
        """Return the hashes of the files of a source, or of its pieces if it reads no files."""
        if isinstance(source, FileSource):
            return self.hash_patterns(source.files)
        return {piece.name: piece.stamp for piece in source.list_pieces()}

    def save(self) -> None:
        """Store the hashes for the next run, in a folder that exists."""
        if self._is_changed and self._path.parent.is_dir():
            files.write_json(self._path, self._known)

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


def find_sources(settings: Settings, key: str = "") -> Iterator[tuple[str, Source]]:
    """Yield the sources of records in the settings of a stage, by their keys."""
    for path, item in _walk(settings, key):
        if isinstance(item, Source):
            yield path, item


def hash_custom_code(settings: Settings) -> FileHashes:
    """Return the hashes of the files with the custom code that settings name."""
    kinds = {
        type(item)
        for _, item in _walk(settings)
        if isinstance(item, Choice) and choices.is_import_path(item.kind)
    }
    paths = sorted({Path(inspect.getfile(kind)) for kind in kinds})
    return {path.name: files.sha256(path)[:HASH_DIGITS] for path in paths}


def _walk(value: Any, key: str = "") -> Iterator[tuple[str, Settings]]:
    """Yield every table of settings with its dotted key; the tables of a source are not entered."""
    if isinstance(value, Settings):
        yield key, value
        if not isinstance(value, Source):
            for name in type(value).model_fields:
                yield from _walk(getattr(value, name), f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _walk(item, key)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _walk(item, f"{key}.{name}")


def _read_cache(path: Path) -> dict[str, tuple[str, str]]:
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


def hash_document(document: Any) -> str:
    """Return the SHA-256 of a JSON-ready document."""
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
