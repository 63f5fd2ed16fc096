"""Phase three of `prepare`: a piece's records become token ids, in the columns of the layout.

    encode/000007.arrow          the split; the cells of rows, or of the chunks that enter them;
                                 of those that are held out the whole texts, where they are kept
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

from regauge.data.columns import column
from regauge.data.layouts import Encoded, Layout, Unfit
from regauge.data.sources import Rejected, Value
from regauge.data.tokenizer import Encoder
from regauge.preparation import read_records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRAIN, HELDOUT, DUPLICATE, REPEAT = range(4)
DROPPED = {DUPLICATE: "exact duplicate", REPEAT: "near duplicate"}
DECISIONS = "decisions.npy"


class _Usable(NamedTuple):
    """A record that has what the layout needs."""

    decision: int
    file: str
    place: str
    fields: dict[str, Value]
    texts: list[str]
    """What is encoded of it."""


def schema(layout: Layout) -> pa.Schema:
    """Return the columns of an encoded piece: the split, the cells, the whole texts."""
    return pa.schema([pa.field("", pa.uint8()), *layout.columns(), *layout.kept()])


def encode_piece(
    layout: Layout, folder: Path, work: Path, item: read_records.Numbered
) -> tuple[int, read_records.Counts]:
    """Encode the records of a piece into `folder` and return its number and counts."""
    columns = schema(layout)
    with read_records.Output(folder, item.number, columns) as output:
        sieve = _Sieve(layout, _encoder(work / "tokenizer"), output)
        for decisions, batch in _decided(work, item):
            output.write(_table(columns, list(sieve.rows(decisions, batch))))
    return item.number, read_records.commit_counts(folder, item.number, sieve.counts)


class _Sieve:
    """Records in, rows out; what does not come out is counted, and what is bad is written down."""

    def __init__(self, layout: Layout, encoder: Encoder, output: read_records.Output) -> None:
        self._layout = layout
        self._encoder = encoder
        self._output = output
        self._kept = [field.name for field in layout.kept()]
        kinds = ("skipped", "rejected", "truncated")
        self.counts: read_records.Counts = {kind: Counter() for kind in kinds}

    def rows(self, decisions: list[int], batch: pa.RecordBatch) -> Iterator[list[Any]]:
        """Yield the cells of `schema` for each row."""
        records = batch.select(["file", "place", "fields"]).to_pylist()
        judged = (self._judge(*pair) for pair in zip(decisions, records, strict=True))
        usable = [record for record in judged if record]
        texts = [text for record in usable for text in record.texts]
        encoded = iter(self._layout.encode(texts, self._encoder))
        for record in usable:
            ids = [next(encoded) for _ in record.texts]
            held = record.decision == HELDOUT
            whole = [record.fields[name] if held else None for name in self._kept]
            try:
                for cells in self._cells(record, ids):
                    yield [record.decision, *cells, *whole]
            except Unfit as unfit:
                self._drop(record.file, record.place, unfit)

    def _judge(self, decision: int, record: dict[str, Any]) -> _Usable | None:
        """Return a record with the texts that the layout takes of it; None when it is no row."""
        if decision in DROPPED:
            self.counts["skipped"][DROPPED[decision]] += 1
            return None
        fields = json.loads(record["fields"])
        try:
            texts = self._layout.texts(fields, self._encoder)
        except Unfit as unfit:
            self._drop(record["file"], record["place"], unfit)
            return None
        return _Usable(decision, record["file"], record["place"], fields, texts)

    def _cells(self, record: _Usable, ids: list[np.ndarray]) -> Iterator[list[Any]]:
        cut = self.counts["truncated"]
        return self._layout.rows(Encoded(record.fields, ids, self._encoder, cut))

    def _drop(self, file: str, place: str, unfit: Unfit) -> None:
        if unfit.bad:
            self._output.reject(Rejected(file, place, unfit.reason, unfit.detail))
        self.counts["rejected" if unfit.bad else "skipped"][unfit.reason] += 1


@cache
def _encoder(folder: Path) -> Encoder:
    return Encoder(folder)


def _decided(work: Path, item: read_records.Numbered) -> Iterator[tuple[list[int], pa.RecordBatch]]:
    decisions = np.load(work / DECISIONS, mmap_mode="r")
    at = item.first
    for batch in read_records.records(work / "read", item.number):
        yield decisions[at : at + batch.num_rows].tolist(), batch
        at += batch.num_rows


def _table(columns: pa.Schema, rows: list[list[Any]]) -> pa.RecordBatch:
    arrays = [
        column([row[place] for row in rows], field.type) for place, field in enumerate(columns)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)
