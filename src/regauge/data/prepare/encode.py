"""`prepare` phase 3: encodes a piece's records as token ids, in the layout's columns.

    encode/000007.arrow          the split, and the cells of rows or row chunks;
                                 for held-out records also the texts before truncation, if stored
    encode/000007.rejected.jsonl records that the layout cannot use
    encode/000007.json           counts

A named layout's pieces are in encode/<name>/. Only this phase applies the layout to records:
unusable records are counted, and rejected ones are written to the file.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from regauge.data.classes import replace_numbers
from regauge.data.columns import build_column
from regauge.data.layouts import EncodedRecord, Layout, UnusableRecord
from regauge.data.prepare import read_records
from regauge.data.sources import Rejected
from regauge.data.tokenizer import LoadedTokenizer, hash_tokenizer
from regauge.data.values import Value

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRAIN, HELDOUT, DUPLICATE, REPEAT, LEAKED = range(5)
SPLIT_NAMES = {TRAIN: "train", HELDOUT: "heldout"}
DROPPED = {
    DUPLICATE: "exact duplicate",
    REPEAT: "near duplicate",
    LEAKED: "near duplicate of a validation record",
}
"""Decisions to leave a record out, with their reason."""
DECISIONS = "decisions.npy"


class _UsableRecord(NamedTuple):
    decision: int
    file: str
    location: str
    fields: dict[str, Value]
    texts: list[str]


def encode_piece(
    layout: Layout, folder: Path, scratch: Path, numbered_piece: read_records.NumberedPiece
) -> tuple[int, read_records.Counts]:
    """Encode a piece's records into a file; return the piece's index and counts."""
    schema = pa.schema(
        [pa.field("", pa.uint8()), *layout.encoded_columns(), *layout.record_text_columns()]
    )
    with read_records.open_piece(folder, numbered_piece.piece_index, schema) as output:
        tokenizer_folder = scratch / "tokenizer"
        tokenizer = _load_tokenizer(tokenizer_folder, hash_tokenizer(tokenizer_folder))
        record_encoder = _RecordEncoder(layout, tokenizer, output, numbered_piece.class_names or {})
        for decisions, batch in _read_decisions(scratch, numbered_piece):
            output.records.write(_build_batch(schema, list(record_encoder.rows(decisions, batch))))
    number = numbered_piece.piece_index
    return number, read_records.commit_counts(folder, number, record_encoder.counts)


class _RecordEncoder:
    """Encodes records as cells, and counts the unusable ones."""

    def __init__(
        self,
        layout: Layout,
        tokenizer: LoadedTokenizer,
        output: read_records.PieceOutput,
        class_names: dict[str, tuple[str, ...]],
    ) -> None:
        self._layout = layout
        self._class_names = {
            name: names for name, names in class_names.items() if name in layout.label_fields()
        }
        self._tokenizer = tokenizer
        self._output = output
        self._text_fields = [field.name for field in layout.record_text_columns()]
        kinds = ("skipped", "rejected", "truncated", "warnings")
        self.counts: read_records.Counts = {kind: Counter() for kind in kinds}
        self._label_columns = {
            field.name: index
            for index, field in enumerate(layout.encoded_columns())
            if field.name in layout.label_fields()
        }
        self.counts["labels"] = {
            name: {"train": Counter(), "heldout": Counter(), "lists": 0}
            for name in self._label_columns
        }

    def rows(self, decisions: list[int], batch: pa.RecordBatch) -> Iterator[list[Any]]:
        """Yield each row's cells: the split, the layout's cells, and the stored texts."""
        records = batch.select(["file", "location", "fields"]).to_pylist()
        selected = (self._select_texts(*pair) for pair in zip(decisions, records, strict=True))
        usable_records = [record for record in selected if record]
        texts = [text for record in usable_records for text in record.texts]
        truncated, warnings = self.counts["truncated"], self.counts["warnings"]
        encoded_texts = iter(self._layout.encode_texts(texts, self._tokenizer))
        for record in usable_records:
            ids = [next(encoded_texts) for _ in record.texts]
            is_heldout = record.decision == HELDOUT
            full_texts = [record.fields[name] if is_heldout else None for name in self._text_fields]
            try:
                for cells in self._layout.build_cells(
                    EncodedRecord(record.fields, ids, self._tokenizer, truncated, warnings)
                ):
                    self._count_labels(record, cells)
                    yield [record.decision, *cells, *full_texts]
            except UnusableRecord as unusable:
                self._count_unusable(record.file, record.location, unusable)

    def _select_texts(self, decision: int, record: dict[str, Any]) -> _UsableRecord | None:
        """Return a record with the texts to encode, or None if it becomes no row."""
        if decision in DROPPED:
            self.counts["skipped"][DROPPED[decision]] += 1
            return None
        fields = json.loads(record["fields"])
        for name, names in self._class_names.items():
            fields[name] = replace_numbers(fields.get(name), names)
        try:
            texts = self._layout.select_texts(fields, self._tokenizer)
        except UnusableRecord as unusable:
            self._count_unusable(record["file"], record["location"], unusable)
            return None
        return _UsableRecord(decision, record["file"], record["location"], fields, texts)

    def _count_labels(self, record: _UsableRecord, cells: list[Any]) -> None:
        for name, index in self._label_columns.items():
            counts = self.counts["labels"][name]
            texts = (text for text in cells[index] if text is not None)
            counts[SPLIT_NAMES[record.decision]].update(texts)
            counts["lists"] += isinstance(record.fields[name], list)

    def _count_unusable(self, file: str, location: str, unusable: UnusableRecord) -> None:
        if unusable.is_rejected:
            self._output.write_rejected(Rejected(file, location, unusable.reason, unusable.detail))
        self.counts["rejected" if unusable.is_rejected else "skipped"][unusable.reason] += 1


@cache
def _load_tokenizer(folder: Path, content_hash: str) -> LoadedTokenizer:
    """Load a tokenizer; its hash is a cache key: a later dataset may use the same folder."""
    del content_hash
    return LoadedTokenizer(folder)


def _read_decisions(
    scratch: Path, numbered_piece: read_records.NumberedPiece
) -> Iterator[tuple[list[int], pa.RecordBatch]]:
    decisions = np.load(scratch / DECISIONS, mmap_mode="r")
    start = numbered_piece.first_record
    for batch in read_records.read_batches(scratch / "read", numbered_piece.piece_index):
        yield decisions[start : start + batch.num_rows].tolist(), batch
        start += batch.num_rows


def _build_batch(schema: pa.Schema, rows: list[list[Any]]) -> pa.RecordBatch:
    arrays = [
        build_column([row[index] for row in rows], field.type) for index, field in enumerate(schema)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
