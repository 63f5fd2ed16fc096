"""The text that benchmarks read: a file that is given, or the documentation of this Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regauge.config import build
from regauge.verbs import prepare

LIBRARY = Path(json.__file__).parent.parent
"""The standard library's folder."""
KINDS = {".jsonl": "jsonl", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


def source(file: Path | None) -> dict[str, Any]:
    """Return the table of a source; what is no known kind of table is plain text by paragraphs."""
    if file is None:
        return {"kind": "python-docs"}
    kind = KINDS.get(file.suffixes[0] if file.suffixes else "")
    own = {"kind": kind} if kind else {"kind": "text", "document": "paragraph"}
    return own | {"files": (str(file),)}


def prepared(folder: Path, source: dict[str, Any], vocabulary: int, **rows: Any) -> Path:
    """Prepare a dataset in a folder, unless it is there; return the folder."""
    tables = {"data": {"path": str(folder)}, "source": source, "rows": rows}
    tables["tokenizer"] = {"vocabulary": vocabulary}
    if not folder.exists():
        prepare.run(build(prepare.ROOT, tables))
    return folder


def corpus(folder: Path) -> Path:
    """Prepare packed rows of the documentation of the standard library's larger packages."""
    roots = (str(LIBRARY / "asyncio"), str(LIBRARY / "email"))
    return prepared(folder, {"kind": "python-docs", "roots": roots}, 4096)
