"""Small corpora, and datasets of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from regauge import config
from regauge.data import dataset
from regauge.verbs import prepare as verb

WORDS = [f"word{number}" for number in range(3000)]


def corpus(path: Path, count: int, length: int = 60) -> list[dict[str, Any]]:
    """Write documents of random words, each fifth with a near-duplicate, and return them."""
    random = np.random.default_rng(count)
    documents: list[dict[str, Any]] = []
    for number in range(count):
        words = [WORDS[place] for place in random.integers(0, 3000, random.integers(3, 2 * length))]
        if number % 5 == 4:
            words = [*documents[number // 2]["text"].split(), "more"]
        text = " ".join(words)
        documents.append({"text": text, "title": " ".join(words[:5]), "number": number})
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return documents


def tables(folder: Path, out: str = "out", **changes: Any) -> config.Tables:
    packed = changes.get("rows", {}).get("layout", "packed") == "packed"
    base = {
        "data": {"path": str(folder / out)},
        "source": {"kind": "jsonl", "files": [str(folder / "*.jsonl")], "piece_mib": 1},
        "tokenizer": {"vocabulary": 500},
        "rows": {"length": 64} if packed else {},
        "split": {"heldout_share": 0.2},
        "prepare": {"processes": 1},
    }
    return config.merge(base, changes)


def settings(folder: Path, out: str = "out", **changes: Any) -> verb.Prepare:
    return config.build(verb.Prepare, tables(folder, out, **changes))


def prepared(folder: Path, out: str = "out", **changes: Any) -> dataset.Dataset:
    verb.run(settings(folder, out, **changes))
    return dataset.Dataset(folder / out)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


FIELDS: dict[str, Any] = {
    "rows": {"layout": "fields", "fields": {"title": 8, "text": 32}, "numbers": ["number"]}
}
