"""Phase three of `prepare`: a piece's records become token ids, in the columns of the layout.

    encode/000007.arrow          packed: the split, and chunks of documents as they enter rows
                                 fields: the split, the columns of a row, and of those that are
                                 held out the whole texts
    encode/000007.rejected.jsonl records that the layout cannot use
    encode/000007.json           counts

The pieces of a layout with a name lie in encode/<name>/. Only here does a record meet the layout:
what it lacks is counted, what is bad is written down.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from regauge.data import reading
from regauge.data.sources import Rejected
from regauge.data.tokenizer import Encoder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from regauge.data.settings import RowLayout

TRAIN, HELDOUT, DUPLICATE, REPEAT = range(4)
DROPPED = {DUPLICATE: "exact duplicate", REPEAT: "near duplicate"}
DECISIONS = "decisions.npy"
TOKENS = pa.list_(pa.int32())
WHOLE = pa.large_string()


class _Usable(NamedTuple):
    """A record that has what the layout needs."""

    decision: int
    file: str
    place: str
    texts: list[str]
    numbers: list[int]


class _Row(NamedTuple):
    """A row of the fields layout, or one chunk of a packed document."""

    decision: int
    texts: list[np.ndarray]
    numbers: list[int]
    whole: list[str] | None = None
    """The texts as they were read, where they are kept."""


def row_columns(layout: RowLayout) -> list[pa.Field]:
    """Return the columns of a row, or of a chunk of a packed one: texts, then numbers."""
    texts = [pa.field(name, TOKENS) for name in layout.texts()]
    return [*texts, *(pa.field(name, pa.int64()) for name in layout.numbers)]


def whole_columns(layout: RowLayout) -> list[pa.Field]:
    """Return the columns of the whole texts that are kept of a held-out row."""
    return [pa.field(name, WHOLE) for name in layout.texts() if layout.layout == "fields"]


def schema(layout: RowLayout) -> pa.Schema:
    """Return the columns of an encoded piece: the split, those of a row, the whole texts."""
    split = pa.field("", pa.uint8())
    return pa.schema([split, *row_columns(layout), *whole_columns(layout)])


def encode_piece(
    layout: RowLayout, folder: Path, work: Path, item: reading.Numbered
) -> tuple[int, reading.Counts]:
    """Encode the records of a piece into `folder` and return its number and counts."""
    with reading.Output(folder, item.number, schema(layout)) as output:
        sieve = _Sieve(layout, _encoder(work / "tokenizer"), output)
        for decisions, batch in _decided(work, item):
            rows = list(sieve.rows(decisions, batch))
            output.write(_table(layout, rows))
    return item.number, reading.commit_counts(folder, item.number, sieve.counts)


class _Sieve:
    """Records in, rows out; what does not come out is counted, and what is bad is written down."""

    def __init__(self, layout: RowLayout, encoder: Encoder, output: reading.Output) -> None:
        self._layout = layout
        self._encoder = encoder
        self._output = output
        kinds = ("skipped", "rejected", "truncated")
        self.counts: reading.Counts = {kind: Counter() for kind in kinds}

    def rows(self, decisions: list[int], batch: pa.RecordBatch) -> Iterator[_Row]:
        records = batch.select(["file", "place", "fields"]).to_pylist()
        judged = (self._judge(*pair) for pair in zip(decisions, records, strict=True))
        usable = [record for record in judged if record]
        texts = [text for record in usable for text in record.texts]
        encoded = iter(self._encoder.encode(texts))
        for record in usable:
            ids = [next(encoded) for _ in record.texts]
            if self._layout.layout == "fields":
                cut = list(map(self._cut, self._layout.fields, ids))
                whole = record.texts if record.decision == HELDOUT else None
                yield _Row(record.decision, cut, record.numbers, whole)
            else:
                for chunk in self._chunks(record, ids[0]):
                    yield _Row(record.decision, [chunk], [])

    def _judge(self, decision: int, record: dict[str, Any]) -> _Usable | None:
        """Return a record with its fields in the layout's order, or None when it is no row."""
        if decision in DROPPED:
            self.counts["skipped"][DROPPED[decision]] += 1
            return None
        fields = json.loads(record["fields"])
        texts = [fields.get(name) for name in self._layout.texts()]
        numbers = [fields.get(name) for name in self._layout.numbers]
        usable = _Usable(decision, record["file"], record["place"], texts, numbers)
        for name, kind in self._wanted():
            if not isinstance(fields.get(name), kind):
                what = "text" if kind is str else "integer"
                self._reject(usable, f"no {what} field '{name}'")
                return None
        for name, text in zip(self._layout.texts(), texts, strict=True):
            if not text.strip():
                self.counts["skipped"][f"empty '{name}'"] += 1
                return None
        return usable

    def _wanted(self) -> Iterator[tuple[str, type]]:
        yield from ((name, str) for name in self._layout.texts())
        yield from ((name, int) for name in self._layout.numbers)

    def _cut(self, name: str, ids: np.ndarray) -> np.ndarray:
        room = self._layout.fields[name] - self._encoder.overhead
        if len(ids) > room:
            self.counts["truncated"][name] += 1
        return self._encoder.wrap(ids[:room])

    def _chunks(self, record: _Usable, ids: np.ndarray) -> Iterator[np.ndarray]:
        room = self._layout.length - self._encoder.overhead
        if len(ids) > room and self._layout.too_long == "reject":
            detail = f"{len(ids) + self._encoder.overhead} tokens"
            self._reject(record, f"longer than {self._layout.length} tokens", detail)
            return
        if len(ids) > room and self._layout.too_long == "truncate":
            self.counts["truncated"][self._layout.text] += 1
            ids = ids[:room]
        for at in range(0, len(ids), room):
            yield self._encoder.wrap(ids[at : at + room])

    def _reject(self, record: _Usable, reason: str, detail: str = "") -> None:
        self._output.reject(Rejected(record.file, record.place, reason, detail))
        self.counts["rejected"][reason] += 1


@cache
def _encoder(folder: Path) -> Encoder:
    return Encoder(folder)


def _decided(work: Path, item: reading.Numbered) -> Iterator[tuple[list[int], pa.RecordBatch]]:
    decisions = np.load(work / DECISIONS, mmap_mode="r")
    at = item.first
    for batch in reading.records(work / "read", item.number):
        yield decisions[at : at + batch.num_rows].tolist(), batch
        at += batch.num_rows


def _table(layout: RowLayout, rows: list[_Row]) -> pa.RecordBatch:
    splits = pa.array([row.decision for row in rows], pa.uint8())
    texts = [lists([row.texts[place] for row in rows]) for place in range(len(layout.texts()))]
    numbers = [
        pa.array([row.numbers[place] for row in rows], pa.int64())
        for place in range(len(layout.numbers))
    ]
    whole = [
        pa.array([row.whole[place] if row.whole else None for row in rows], WHOLE)
        for place in range(len(whole_columns(layout)))
    ]
    return pa.RecordBatch.from_arrays([splits, *texts, *numbers, *whole], schema=schema(layout))


def lists(values: list[np.ndarray]) -> pa.ListArray:
    """Return int32 arrays as one Arrow column."""
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    flat = np.concatenate(values) if values else np.zeros(0, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, pa.int32()))
