"""The source that reads files with a suffix."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from regauge.data.sources import _compressed
from regauge.system.errors import SettingsError

SOURCE_KINDS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".conll": "conll",
    ".conllu": "conll",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
}
"""The kind of the source that reads files with a suffix."""
WILDCARDS = set("*?[")
"""Characters of a suffix that matches several ones, as in 'items/*.jsonl.*'."""


def find_source_kind(name: str) -> str:
    """Return the kind of source that reads a file; empty if it is not a data file."""
    path = PurePosixPath(name)
    is_hidden = any(part.startswith((".", "__")) for part in path.parts)
    suffix = PurePosixPath(path.stem).suffix if path.suffix in _compressed.SUFFIXES else path.suffix
    return "" if is_hidden else SOURCE_KINDS.get(suffix, "")


def build_source_table(files: str) -> dict[str, Any]:
    """Return the table `source` of files, such as "items/*.jsonl.gz", by their suffix.

    A folder with a corpus and queries is a search benchmark. Raises SettingsError for an unknown
    suffix.
    """
    if all(Path(files, name).is_file() for name in ("corpus.jsonl", "queries.jsonl")):
        return {"kind": "beir", "folder": files}
    suffixes = [
        suffix
        for suffix in PurePosixPath(files).suffixes
        if suffix not in _compressed.SUFFIXES and not WILDCARDS & set(suffix)
    ]
    kind = SOURCE_KINDS.get(suffixes[-1]) if suffixes else None
    if kind is None:
        remedy = f"use one of {', '.join(SOURCE_KINDS)}, or write a table source"
        raise SettingsError(f"'{files}' has no known suffix", remedy)
    document = {"document": "line"} if kind == "text" else {}
    return {"kind": kind, "files": (files,), **document}
