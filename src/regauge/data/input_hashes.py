"""Did the inputs change? Hashes of files, sources and custom code, and the changes in words.

Local files are hashed by content, so a copy or a new modification time changes nothing. A file is
read again only if its size or its modification time has changed. Remote files are identified by
their size and version.
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
"""Hash by name of a file, or of another piece of a source."""
HASH_DIGITS = 32
MAX_LISTED = 5
"""Changes of one kind that are listed."""
SHOWN_DIGITS = 8


class InputHashes:
    """Computes the hashes of files, and keeps those of unchanged files."""

    def __init__(self, caches: Iterable[Path]) -> None:
        """Read the hashes that earlier commands have stored."""
        self._known = {name: entry for path in caches for name, entry in _read(path).items()}
        self._is_changed = False

    def hash_patterns(self, patterns: tuple[str, ...]) -> FileHashes:
        """Return the hash of every file that matches; raises DataError if none matches."""
        return self._hash_files(find_files(patterns))

    def hash_source(self, source: Source) -> FileHashes:
        """Return the hashes of the files of a source, or of its pieces if it reads no files."""
        if isinstance(source, FileSource):
            return self.hash_patterns(source.files)
        return {piece.name: piece.stamp for piece in source.list_pieces()}

    def hash_pieces(self, pieces: Sequence[Piece]) -> FileHashes:
        """Return the hash of each piece by its name.

        A piece of local files is identified by their content, any other piece by its stamp.
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
        """Store all known hashes in a folder that exists, if there are new ones."""
        if self._is_changed and path.parent.is_dir():
            files.write_json(path, self._known)
            self._is_changed = False

    def _hash_files(self, inputs: Iterable[InputFile]) -> FileHashes:
        unique = {file.name: file for file in inputs}
        with ThreadPoolExecutor() as pool:
            return dict(zip(unique, pool.map(self._hash_file, unique.values()), strict=True))

    def _hash_file(self, file: InputFile) -> str:
        """Return the hash of a local file, or the size and version of a remote file."""
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
    """Yield the sources of records in the settings of a stage, by their keys."""
    for path, item in _walk(settings):
        if isinstance(item, Source):
            yield path, item


def find_custom_code(settings: Settings) -> list[Path]:
    """Return the files with the custom code that settings name, sorted."""
    kinds = {
        type(item)
        for _, item in _walk(settings)
        if isinstance(item, Choice) and choices.is_import_path(item.kind)
    }
    return sorted({Path(inspect.getfile(kind)) for kind in kinds})


def hash_custom_code(settings: Settings) -> FileHashes:
    """Return the hashes of the files with the custom code that settings name."""
    return {path.name: files.sha256(path)[:HASH_DIGITS] for path in find_custom_code(settings)}


def stamp_files(paths: Iterable[Path]) -> dict[str, list[int]]:
    """Return the sizes and the modification times of files, which are not read."""
    stats = {str(path): path.stat() for path in sorted(paths) if path.is_file()}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def list_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return one text for every input in which two identities of a stage differ.

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
    """Return one text for every key in which the settings of two identities differ."""
    old, new = (dict(flatten(side.get("settings", {}))) for side in (before, now))
    return [
        f"'{key}' has changed from {old.get(key)!r} to {new.get(key)!r}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def _read(path: Path) -> dict[str, tuple[str, str]]:
    """Return the known stamps and hashes; nothing if the file is missing or damaged."""
    return {
        name: (str(entry[0]), str(entry[1]))
        for name, entry in (find_valid_json(path) or {}).items()
        if isinstance(entry, list) and len(entry) == 2  # noqa: PLR2004 (stamp and hash)
    }


def _stat_files(piece: Piece) -> list[InputFile]:
    """Return the files of a piece whose stamp depends on nothing but local files."""
    paths = [Path(name) for name in piece.files]
    if not all(path.is_file() for path in paths):
        return []
    stats = [stat_file(path) for path in paths]
    return stats if hash_stats(stats) == piece.stamp else []


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


def _compare_files(key: str, before: FileHashes, now: FileHashes) -> list[str]:
    """Return the files of a source that are new, that have changed, or that are gone."""
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
