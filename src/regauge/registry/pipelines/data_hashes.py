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

from regauge.config import Choice, Settings
from regauge.data.content_hashes import HASH_DIGITS, ContentHashes
from regauge.data.sources import Source
from regauge.data.sources._files import FileSource, find_files
from regauge.system import choices, files

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE = "data_hashes.json"
"""File of known hashes, in the folder of the pipeline."""

FileHashes = dict[str, str]
"""Hash by name of a file, or of another piece of a source."""


class DataHasher:
    """Computes hashes of files, and keeps those of unchanged files."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / CACHE
        self._hashes = ContentHashes([self._path])

    def hash_patterns(self, patterns: tuple[str, ...]) -> FileHashes:
        """Return the hash of every file that matches; raises DataError if none matches."""
        return self._hashes.hash_files(find_files(patterns))

    def hash_source(self, source: Source) -> FileHashes:
        """Return the hashes of the files of a source, or of its pieces if it reads no files."""
        if isinstance(source, FileSource):
            return self.hash_patterns(source.files)
        return {piece.name: piece.stamp for piece in source.list_pieces()}

    def save(self) -> None:
        """Store the hashes for the next run, in a folder that exists."""
        self._hashes.save(self._path)


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


def hash_document(document: Any) -> str:
    """Return the SHA-256 of a JSON-ready document."""
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
