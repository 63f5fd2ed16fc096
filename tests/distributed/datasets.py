"""Small datasets of random tokens, written in the format that `prepare` writes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from regauge.config import dump
from regauge.data.shards import Field, Manifest, Shard, Split, TokenizerFacts, file_sha256

VOCABULARY = 300
LENGTH = 32
FACTS = TokenizerFacts(
    sha256=hashlib.sha256(b"none").hexdigest(),
    vocabulary=VOCABULARY,
    pad=0,
    mask=4,
    separator=3,
    special=(0, 1, 2, 3, 4),
)


def packed(folder: Path, rows: int = 40, heldout: int = 10) -> Path:
    """Write packed rows of two or three documents each; the last tokens of some are padding."""
    splits = {"train": _packed_rows(rows, 1), "heldout": _packed_rows(heldout, 2)}
    fields = {"tokens": Field(limit=LENGTH), "segments": Field(limit=LENGTH, kind="segments")}
    return _write(folder, "packed", fields, splits)


def pairs(folder: Path, rows: int = 40, heldout: int = 10) -> Path:
    """Write pairs that share tokens, so that there is something to learn."""
    splits = {"train": _pair_rows(rows, 3), "heldout": _pair_rows(heldout, 4)}
    fields = {}
    for name, limit in (("query", 12), ("document", LENGTH)):
        lengths = {
            split: tuple(
                np.bincount([len(row[name]) for row in rows], minlength=limit + 1).tolist()
            )
            for split, rows in splits.items()
        }
        fields[name] = Field(limit=limit, lengths=lengths)
    return _write(folder, "fields", fields, splits)


def _packed_rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        cuts = sorted(draw.choice(np.arange(4, LENGTH - 2), 2, replace=False).tolist())
        end = int(draw.integers(LENGTH - 2, LENGTH + 1))
        segments = [1 + (place >= cuts[0]) + (place >= cuts[1]) for place in range(end)]
        tokens = (5 + draw.integers(0, 40, end) ** 2 % (VOCABULARY - 5)).tolist()
        padding = [0] * (LENGTH - end)
        rows.append({"tokens": tokens + padding, "segments": segments + padding})
    return rows


def _pair_rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        document = draw.integers(5, VOCABULARY, int(draw.integers(8, LENGTH + 1)))
        query = draw.choice(document, int(draw.integers(3, 13)))
        rows.append({"query": query.tolist(), "document": document.tolist()})
    return rows


def _write(
    folder: Path,
    layout: str,
    fields: dict[str, Field],
    splits: dict[str, list[dict[str, list[int]]]],
) -> Path:
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer_config.json").write_text("{}")
    described = {}
    for name, rows in splits.items():
        path = folder / f"{name}-00000.arrow"
        schema = pa.schema([(column, pa.list_(pa.int32())) for column in fields])
        table = pa.Table.from_pylist(rows, schema=schema).combine_chunks()
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_table(table)
        tokens = sum(len(row[next(iter(fields))]) for row in rows)
        shard = Shard(file=path.name, rows=len(rows), tokens=tokens, sha256=file_sha256(path))
        described[name] = Split(rows=len(rows), tokens=tokens, shards=(shard,))
    manifest = Manifest(
        layout=layout, fields=fields, splits=described, tokenizer=FACTS, settings={}
    )
    (folder / "manifest.json").write_text(json.dumps(dump(manifest)))
    return folder
