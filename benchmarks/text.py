"""The text that benchmarks read: a file that is given, or the documentation of this Python."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from regauge.config import build
from regauge.data.sources import Record
from regauge.verbs import prepare

LIBRARY = Path(json.__file__).parent.parent
"""The standard library's folder."""
KINDS = {".jsonl": "jsonl", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
WORD = re.compile(r"\w+")
SUMMARY_WORDS, BODY_WORDS = range(3, 41), 20
"""How many words a summary may have, and a body has to have: as in the documentation."""
QUERIES, CANDIDATES = 8000, 8


class Search(NamedTuple):
    """Queries with the candidates that each is shown, and the features of these."""

    source: dict[str, Any]
    reals: tuple[str, ...]
    categories: tuple[str, ...]


def source(file: Path | None) -> dict[str, Any]:
    """Return the table of a source; what is no known kind of table is plain text by paragraphs."""
    if file is None:
        return {"kind": "python-docs"}
    kind = KINDS.get(file.suffixes[0] if file.suffixes else "")
    own = {"kind": kind} if kind else {"kind": "text", "document": "paragraph"}
    return own | {"files": (str(file),)}


def texts(file: Path | None) -> Iterator[str]:
    """Yield the documents of a source."""
    tables = {"data": {"path": "none"}, "source": source(file)}
    found = build(prepare.ROOT, tables).source
    for piece in found.list_pieces():
        for item in found.read(piece):
            if isinstance(item, Record) and "text" in item.fields:
                yield str(item.fields["text"])


def pairs(file: Path | None, folder: Path) -> dict[str, Any]:
    """Return the table of a source of pairs, `summary` and `body`.

    Of a file they are the first sentence of each text and the rest, written to a folder.
    """
    if file is None:
        return {"kind": "python-docs"}
    found = ({"summary": summary, "body": body} for summary, body in _divided(texts(file)))
    return _written(folder / "pairs.jsonl", found)


def search(file: Path | None, folder: Path) -> Search:
    """Return a source of a search: `query`, `document`, features and `label`.

    In a file who looks for a first sentence is shown the rest of its text and of the next ones.
    """
    if file is None:
        kind = {"kind": "python-docs-search", "queries": QUERIES, "candidates": CANDIDATES}
        reals = ("parameters", "words", "depth", "overlap")
        return Search(kind, reals, ("module", "kind"))
    pages = list(_divided(texts(file)))
    found = (
        _candidate(summary, pages[(place + away) % len(pages)], relevant=not away)
        for place, (summary, _) in enumerate(pages[:QUERIES])
        for away in range(min(CANDIDATES, len(pages)))
    )
    return Search(_written(folder / "search.jsonl", found), ("words", "overlap"), ("first",))


def prepared(folder: Path, source: dict[str, Any], vocabulary: int, **rows: Any) -> Path:
    """Prepare a dataset in a folder, unless it is there; return the folder."""
    tables: dict[str, Any] = {"data": {"path": str(folder)}, "source": source, "rows": rows}
    tables["tokenizer"] = {"vocabulary": vocabulary}
    if "group_by" in rows:
        tables["split"] = {"group_by": rows["group_by"]}
    if not folder.exists():
        prepare.run(build(prepare.ROOT, tables))
    return folder


def corpus(folder: Path) -> Path:
    """Prepare packed rows of the documentation of the standard library's larger packages."""
    roots = (str(LIBRARY / "asyncio"), str(LIBRARY / "email"))
    return prepared(folder, {"kind": "python-docs", "roots": roots}, 4096)


def _divided(found: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the first sentence of each text and its rest, where both say something; each once."""
    seen = set()
    for text in found:
        summary, *rest = SENTENCE.split(text.strip(), maxsplit=1)
        body = "".join(rest)
        usual = len(summary.split()) in SUMMARY_WORDS and len(body.split()) >= BODY_WORDS
        if usual and summary not in seen:
            seen.add(summary)
            yield summary, body


def _candidate(query: str, page: tuple[str, str], *, relevant: bool) -> dict[str, Any]:
    asked, words = (WORD.findall(text.lower()) for text in (query, page[1]))
    return {
        "query": query,
        "document": page[1],
        "words": len(words),
        "overlap": len({*asked} & {*words}) / max(len({*asked}), 1),
        "first": next(iter(words), ""),
        "label": int(relevant),
    }


def _written(path: Path, records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return {"kind": "jsonl", "files": (str(path),)}
