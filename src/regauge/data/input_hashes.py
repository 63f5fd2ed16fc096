"""Did the inputs change? Hashes files, sources and custom code, and describes changes.

Local files are hashed by content, so a copy or a new modification time changes nothing. A file is
read again only after a change in size or modification time. Remote files are identified by size and
version.
"""

from __future__ import annotations

import hashlib
import inspect
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.config import Choice, Settings, flatten
from regauge.data.sources import Source
from regauge.data.sources._files import FileSource, find_files, hash_stats, stat_file
from regauge.system import choices, files
from regauge.system.json_files import find_valid_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from regauge.data.sources import Piece
    from regauge.data.sources._files import InputFile

FileHashes = dict[str, str]
"""Name of a file, or of another source piece -> hash."""
HASH_DIGITS = 32
MAX_LISTED = 5
"""Maximum changes to list per kind."""
SHOWN_DIGITS = 8


class InputHashes:
    """Hashes files, and keeps the hashes of unchanged ones."""

    def __init__(self, caches: Iterable[Path]) -> None:
        """Read the hashes stored by earlier commands."""
        self._known = {name: entry for path in caches for name, entry in _read(path).items()}
        self._is_changed = False

    def hash_patterns(self, patterns: tuple[str, ...]) -> FileHashes:
        """Hash every matching file; raises DataError if none matches."""
        return self._hash_files(find_files(patterns))

    def hash_source(self, source: Source) -> FileHashes:
        """Hash a source's files, or its pieces if it reads no files."""
        if isinstance(source, FileSource):
            return self.hash_patterns(source.files)
        return {piece.name: piece.stamp for piece in source.list_pieces()}

    def hash_pieces(self, pieces: Sequence[Piece]) -> FileHashes:
        """Return piece name -> hash.

        Pieces with local files are identified by content, other pieces by stamp.
        """
        identities = {piece.name: piece.stamp for piece in pieces}
        local = {piece: group for piece in pieces if (group := _stat_files(piece))}
        hashes = self._hash_files(file for group in local.values() for file in group)
        for piece in local:
            content = "".join(f"{name}\0{hashes[name]}\n" for name in piece.files)
            digest = hashlib.sha256(content.encode()).hexdigest()
            identities[piece.name] = digest[:HASH_DIGITS]
        return identities

    def save(self, path: Path) -> None:
        """Store all known hashes in an existing folder, if some are new."""
        if self._is_changed and path.parent.is_dir():
            files.write_json(path, self._known)
            self._is_changed = False

    def _hash_files(self, inputs: Iterable[InputFile]) -> FileHashes:
        unique = {file.name: file for file in inputs}
        with ThreadPoolExecutor() as pool:
            return dict(zip(unique, pool.map(self._hash_file, unique.values()), strict=True))

    def _hash_file(self, file: InputFile) -> str:
        """Hash a local file, or return a remote file's size and version."""
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


def find_sources(settings: Settings) -> Iterator[tuple[str, Source]]:
    """Yield (keys, record source) for each source in a stage's settings."""
    for path, item in _walk(settings):
        if isinstance(item, Source):
            yield path, item


def find_custom_code(settings: Settings) -> list[Path]:
    """Return the custom code files named in settings, sorted."""
    kinds = {
        type(item)
        for _, item in _walk(settings)
        if isinstance(item, Choice) and choices.is_import_path(item.kind)
    }
    return sorted({Path(inspect.getfile(kind)) for kind in kinds})


def hash_custom_code(settings: Settings) -> FileHashes:
    return {path.name: files.sha256(path)[:HASH_DIGITS] for path in find_custom_code(settings)}


def stamp_files(paths: Iterable[Path]) -> dict[str, list[int]]:
    """Return file sizes and modification times without reading the files."""
    stats = {str(path): path.stat() for path in sorted(paths) if path.is_file()}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def list_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describe each input in which two stage identities differ.

    An identity has some of the tables settings, data, code and inputs, the serving version and the
    verb.
    """
    changes = list_settings_changes(before, now)
    old_data, data = before.get("data", {}), now.get("data", {})
    for key in sorted({*old_data, *data}):
        changes += _compare_files(key, old_data.get(key, {}), data.get(key, {}))
    for table, label in (("code", "code {}"), ("inputs", "input '{}'")):
        old_hashes = before.get(table, {})
        for name, value in now.get(table, {}).items():
            if (old := old_hashes.get(name, "none")) != value:
                span = f"{_shorten(old)} to {_shorten(value)}"
                changes.append(f"{label.format(name)} has changed from {span}")
    for key, label in (("serving", "the serving version"), ("verb", "the verb")):
        old, new = before.get(key), now.get(key)
        if old != new:
            changes.append(f"{label} has changed from {old or 'none'} to {new or 'none'}")
    return changes


def list_settings_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describe each settings key in which two identities differ."""
    old, new = (dict(flatten(side.get("settings", {}))) for side in (before, now))
    return [
        f"'{key}' has changed from {old.get(key)!r} to {new.get(key)!r}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def _read(path: Path) -> dict[str, tuple[str, str]]:
    """Return known stamps and hashes; nothing if the file is missing or damaged."""
    return {
        name: (str(entry[0]), str(entry[1]))
        for name, entry in (find_valid_json(path) or {}).items()
        if isinstance(entry, list) and len(entry) == 2  # noqa: PLR2004 (stamp and hash)
    }


def _stat_files(piece: Piece) -> list[InputFile]:
    """Return a piece's files if the stamp depends only on local files."""
    paths = [Path(name) for name in piece.files]
    if not all(path.is_file() for path in paths):
        return []
    stats = [stat_file(path) for path in paths]
    return stats if hash_stats(stats) == piece.stamp else []


def _walk(value: Any, key: str = "") -> Iterator[tuple[str, Settings]]:
    """Yield every settings table with its dotted key; does not enter source tables."""
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


def _compare_files(key: str, before: FileHashes, now: FileHashes) -> list[str]:
    kinds = {
        "new": [name for name in now if name not in before],
        "changed": [name for name in now if name in before and before[name] != now[name]],
        "no longer read": [name for name in before if name not in now],
    }
    return [f"data {key}: {_join(names)} {state}" for state, names in kinds.items() if names]


def _join(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{more}"


def _shorten(value: str) -> str:
    return value[:SHOWN_DIGITS] if len(value) > 2 * SHOWN_DIGITS else value
