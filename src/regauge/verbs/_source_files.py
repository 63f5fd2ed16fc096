"""The table of a source for files that a command line names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regauge.errors import SettingsError

SOURCE_KINDS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".arrow": "arrow",
}
"""The kind of the source that reads files with a suffix."""
COMPRESSED_SUFFIXES = {".gz", ".zst"}
WILDCARDS = set("*?[")
"""Characters of a suffix that matches several ones, as in 'items/*.jsonl.*'."""


def build_source(files: str) -> dict[str, Any]:
    """Build the table of a source of files; the suffix of the files selects its kind."""
    suffixes = [
        suffix
        for suffix in Path(files).suffixes
        if suffix not in COMPRESSED_SUFFIXES and not WILDCARDS & set(suffix)
    ]
    kind = SOURCE_KINDS.get(suffixes[-1]) if suffixes else None
    if kind is None:
        remedy = f"use one of {', '.join(SOURCE_KINDS)}, or write a table source"
        raise SettingsError(f"'{files}' has no known suffix", remedy)
    document = {"document": "line"} if kind == "text" else {}
    return {"kind": kind, "files": (files,), **document}
