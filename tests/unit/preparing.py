"""Small corpora and the datasets that are prepared from them, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from regauge import config
from regauge.commands import prepare as verb
from regauge.data import dataset

WORDS = [f"word{number}" for number in range(3000)]


def write_corpus(path: Path, count: int, length: int = 60) -> list[dict[str, Any]]:
    """Write documents of random words and return them; every fifth is a near-duplicate."""
    random = np.random.default_rng(count)
    documents: list[dict[str, Any]] = []
    for number in range(count):
        words = [WORDS[index] for index in random.integers(0, 3000, random.integers(3, 2 * length))]
        if number % 5 == 4:
            words = [*documents[number // 2]["text"].split(), "more"]
        text = " ".join(words)
        documents.append({"text": text, "title": " ".join(words[:5]), "number": number})
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return documents


def build_tables(folder: Path, out: str = "out", **changes: Any) -> config.Tables:
    """Return the tables of a run file that prepares the JSON lines of a folder."""
    packed = changes.get("rows", {}).get("layout", "packed") == "packed"
    base = {
        "data": {"path": str(folder / out)},
        "source": {"kind": "jsonl", "files": [str(folder / "*.jsonl")], "chunk_mib": 1},
        "tokenizer": {"vocab_size": 500},
        "rows": {"length": 64} if packed else {},
        "split": {"heldout_fraction": 0.2},
        "prepare": {"processes": 1},
    }
    return config.merge(base, changes)


def build_settings(folder: Path, out: str = "out", **changes: Any) -> verb.PrepareSettings:
    """Return the settings of `prepare` for the JSON lines of a folder."""
    return config.build(verb.PrepareSettings, build_tables(folder, out, **changes))


def prepare_dataset(folder: Path, out: str = "out", **changes: Any) -> dataset.Dataset:
    """Prepare a dataset from the JSON lines of a folder."""
    verb.run(build_settings(folder, out, **changes))
    return dataset.Dataset(folder / out)


def read_contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files of a folder by relative path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


FIELDS: dict[str, Any] = {
    "rows": {"layout": "fields", "fields": {"title": 8, "text": 32}, "integers": ["number"]}
}
