"""Text for benchmarks: a given file, or the documentation of this Python."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from regauge.commands import prepare
from regauge.config import build
from regauge.data.sources import Record

LIBRARY = Path(json.__file__).parent.parent
"""Folder of the standard library."""
KINDS = {".jsonl": "jsonl", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
WORD = re.compile(r"\w+")
MIN_CHARACTERS = 20
"""Minimum length of a sentence."""
SUMMARY_WORDS, MIN_BODY_WORDS = range(3, 41), 20
"""Allowed numbers of words, as in the source `python-docs`."""
NUM_QUERIES, NUM_CANDIDATES = 8000, 8
NUM_CLASSES = 16


class Search(NamedTuple):
    """A source of queries with their candidates, and the names of the candidates' features."""

    source: dict[str, Any]
    numeric_features: tuple[str, ...]
    categorical_features: tuple[str, ...]


def build_source(file: Path | None) -> dict[str, Any]:
    """Return the table of a source; an unknown file type is plain text, one record a paragraph."""
    if file is None:
        return {"kind": "python-docs"}
    kind = KINDS.get(file.suffixes[0] if file.suffixes else "")
    table = {"kind": kind} if kind else {"kind": "text", "document": "paragraph"}
    return table | {"files": (str(file),)}


def read_texts(file: Path | None) -> Iterator[str]:
    """Yield the documents of a source."""
    for record in read_records(build_source(file)):
        if "text" in record.fields:
            yield str(record.fields["text"])


def read_records(table: dict[str, Any]) -> Iterator[Record]:
    """Yield the records of the table of a source, without those that cannot be read."""
    source = build(prepare.ROOT, {"data": {"path": "none"}, "source": table}).source
    for piece in source.list_pieces():
        yield from (record for record in source.read(piece) if isinstance(record, Record))


def read_sentences(file: Path | None, count: int) -> list[str]:
    """Return the first distinct sentences of a source."""
    sentences: dict[str, None] = {}
    for text in read_texts(file):
        sentences |= dict.fromkeys(
            sentence
            for part in SENTENCE.split(text)
            if len(sentence := " ".join(part.split())) >= MIN_CHARACTERS
        )
        if len(sentences) >= count:
            break
    return list(sentences)[:count]


def build_pair_source(file: Path | None, folder: Path) -> dict[str, Any]:
    """Return the table of a source of pairs, `summary` and `body`.

    The pairs of a file are the first sentence of each text and its rest, written to a folder.
    """
    if file is None:
        return {"kind": "python-docs"}
    records = (
        {"summary": summary, "body": body} for summary, body in _split_summaries(read_texts(file))
    )
    return _write_records(folder / "pairs.jsonl", records)


def build_search_source(file: Path | None, folder: Path) -> Search:
    """Return a source of a search: `query`, `document`, features and `label`.

    The queries of a file are first sentences; the candidates are the rest of the same text and of
    the next texts.
    """
    if file is None:
        kind = {"kind": "python-docs-search", "queries": NUM_QUERIES, "candidates": NUM_CANDIDATES}
        numeric_features = ("parameters", "words", "depth", "overlap")
        return Search(kind, numeric_features, ("module", "kind"))
    pages = list(_split_summaries(read_texts(file)))
    records = (
        _build_candidate(summary, pages[(index + offset) % len(pages)], relevant=not offset)
        for index, (summary, _) in enumerate(pages[:NUM_QUERIES])
        for offset in range(min(NUM_CANDIDATES, len(pages)))
    )
    table = _write_records(folder / "search.jsonl", records)
    return Search(table, ("words", "overlap"), ("first",))


def build_label_source(file: Path | None, folder: Path) -> dict[str, Any]:
    """Return the table of a source of labeled texts, `text` and `label`.

    Without a file they are the first paragraphs of docstrings, and the label is the module; texts
    of the most frequent modules are used.
    """
    if file is not None:
        return build_source(file)
    texts = {}
    for record in read_records({"kind": "python-docs", "qualified_names": True}):
        paragraph = str(record.fields["text"]).strip().split("\n\n")[0]
        texts[" ".join(paragraph.split())] = str(record.fields["name"]).partition(".")[0]
    frequent = {label for label, _ in Counter(texts.values()).most_common(NUM_CLASSES)}
    records = ({"text": text, "label": label} for text, label in texts.items() if label in frequent)
    return _write_records(folder / "labels.jsonl", records)


def prepare_dataset(
    folder: Path, source: dict[str, Any], tokenizer: int | dict[str, Any], **rows: Any
) -> Path:
    """Prepare a dataset in a folder unless it exists; return the folder.

    `tokenizer` is its table, or the size of its vocabulary.
    """
    tables: dict[str, Any] = {"data": {"path": str(folder)}, "source": source, "rows": rows}
    tables["tokenizer"] = {"vocab_size": tokenizer} if isinstance(tokenizer, int) else tokenizer
    if "group_by" in rows:
        tables["split"] = {"group_by": rows["group_by"]}
    if not folder.exists():
        prepare.run(build(prepare.ROOT, tables))
    return folder


def prepare_library_docs(folder: Path) -> Path:
    """Prepare packed rows of the documentation of two larger standard library packages."""
    roots = (str(LIBRARY / "asyncio"), str(LIBRARY / "email"))
    return prepare_dataset(folder, {"kind": "python-docs", "roots": roots}, 4096)


def _split_summaries(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the first sentence of each text and its rest, if both are long enough; each once."""
    summaries = set()
    for text in texts:
        summary, *rest = SENTENCE.split(text.strip(), maxsplit=1)
        body = "".join(rest)
        is_usable = len(summary.split()) in SUMMARY_WORDS and len(body.split()) >= MIN_BODY_WORDS
        if is_usable and summary not in summaries:
            summaries.add(summary)
            yield summary, body


def _build_candidate(query: str, page: tuple[str, str], *, relevant: bool) -> dict[str, Any]:
    query_words, words = (WORD.findall(text.lower()) for text in (query, page[1]))
    return {
        "query": query,
        "document": page[1],
        "words": len(words),
        "overlap": len({*query_words} & {*words}) / max(len({*query_words}), 1),
        "first": next(iter(words), ""),
        "label": int(relevant),
    }


def _write_records(path: Path, records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return {"kind": "jsonl", "files": (str(path),)}
