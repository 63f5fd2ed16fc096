"""`prepare` phase 1: reads each piece into a file of records with hashes and signatures.

    read/000007.arrow           records: file, location, fields (JSON), hash, perhaps a signature
    read/000007.rejected.jsonl  unusable input
    read/000007.json            counts; the piece is done if this file exists

A file is written under a temporary name and renamed, so a file with a piece's name is complete.
"""

from __future__ import annotations

import json
from collections import ChainMap, Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np
import pyarrow as pa

from regauge.data import duplicates
from regauge.data.prepare.phase_progress import PhaseProgress
from regauge.data.sources import Record, Rejected, Skipped, reject_undecodable
from regauge.system.errors import DataError
from regauge.system.files import replace_atomically, write_atomic
from regauge.system.json_files import find_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from regauge.data.layouts import Layout
    from regauge.data.prepare.process_pool import ProcessPool
    from regauge.data.settings import TextLimits
    from regauge.data.sources import Piece, Source, SourceItem
    from regauge.data.values import Value

CONTENT, HASH, SIGNATURE = "content", "hash", "signature"
"""Columns with the hash of everything that rows read, and with the hash and the signature of the
texts that each layout reads."""
RECORDS_PER_BATCH = 1024
MAX_BATCH_CHARACTERS = 2**22
"""Maximum characters in a batch held in memory."""
Counts = dict[str, Any]
"""A piece's counts by kind, and `rejected` and others by reason; JSON-ready."""


class NumberedPiece(NamedTuple):
    """A piece, its index in source order, and its first record's number."""

    piece_index: int
    piece: Piece
    first_record: int = 0
    is_validation: bool = False
    class_names: dict[str, tuple[str, ...]] | None = None
    """Field -> names declared by the source for integers."""


class RecordFilter(NamedTuple):
    """Conditions for a record to be prepared."""

    limits: Mapping[str, TextLimits]
    """Text field -> length limits; a record with a text outside its field's limits is skipped."""
    group_by: str | None = None
    """Field with a required value, because it decides the split; other records are rejected."""

    def apply(self, items: Iterable[SourceItem]) -> Iterator[SourceItem]:
        """Yield the items, skipping or rejecting records that do not meet the conditions."""
        for item in items:
            if not isinstance(item, Record):
                yield item
            elif reason := _find_reason(item, self.limits):
                yield Skipped(reason, item.fields)
            elif self.group_by is not None and self.group_by not in item.fields:
                yield Rejected(item.file, item.location, f"no group in '{self.group_by}'")
            else:
                yield item


class RowFields(NamedTuple):
    """The fields that rows are made from, which decide whether records are duplicates."""

    layouts: tuple[Layout, ...]
    with_signatures: bool = True
    """Whether near-duplicates are searched."""

    @property
    def compared_layouts(self) -> tuple[Layout, ...]:
        """Layouts that read different texts."""
        return tuple({item.text_fields() or item.kind: item for item in self.layouts}.values())

    @property
    def schema(self) -> pa.Schema:
        """Columns in a file of records."""
        count = len(self.compared_layouts)
        fields = [
            ("file", pa.string()),
            ("location", pa.string()),
            ("fields", pa.large_string()),
            (CONTENT, pa.binary(duplicates.HASH_BYTES)),
            (HASH, pa.binary(count * duplicates.HASH_BYTES)),
            (SIGNATURE, pa.binary(count * duplicates.SIGNATURE_BYTES)),
        ]
        return pa.schema(fields if self.with_signatures else fields[:-1])

    def join_texts(self, record: dict[str, Value]) -> str:
        """Join the texts that rows have from a record."""
        selected = (layout.select_text_fields(record) for layout in self.layouts)
        return duplicates.join_texts(dict(ChainMap(*selected)))

    def build_batch(self, batch: list[Record], counts: Counts) -> pa.RecordBatch:
        counts["records"] += len(batch)
        counts["text_bytes"] += sum(len(self.join_texts(item.fields).encode()) for item in batch)
        texts = [
            [_join_compared(item, layout) for item in batch] for layout in self.compared_layouts
        ]
        hashes = [list(map(duplicates.hash_content, column)) for column in texts]
        columns = [
            [record.file for record in batch],
            [record.location for record in batch],
            [json.dumps(record.fields, ensure_ascii=False) for record in batch],
            [duplicates.hash_content(self._encode_read(record)) for record in batch],
            list(map(b"".join, zip(*hashes, strict=True))),
        ]
        schema = self.schema
        arrays = [pa.array(column, schema.field(i).type) for i, column in enumerate(columns)]
        if self.with_signatures:
            signatures = np.hstack([duplicates.compute_signatures(column) for column in texts])
            buffers = [None, pa.py_buffer(signatures.astype("<u4").tobytes())]
            arrays.append(pa.Array.from_buffers(schema.field(SIGNATURE).type, len(batch), buffers))
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _encode_read(self, record: Record) -> str:
        selected = (layout.select_fields(record.fields) for layout in self.layouts)
        return duplicates.encode_fields(dict(ChainMap(*selected)) or record.fields)


def read_piece(
    sources: tuple[Source, ...],
    record_filter: RecordFilter,
    row_fields: RowFields,
    folder: Path,
    numbered_piece: NumberedPiece,
) -> tuple[int, Counts]:
    """Read a piece of training or validation records into a file; return its index and counts.

    `sources` has the training source, and the validation source if there is one. If a layout has
    labels, the counts have the class names declared by the source.
    """
    source = sources[numbered_piece.is_validation]
    batch: list[Record] = []
    counts: Counts = {"records": 0, "text_bytes": 0}
    counts |= {kind: Counter() for kind in ("rejected", "skipped", "field_names")}
    if any(layout.label_fields() for layout in row_fields.layouts):
        counts["class_names"] = source.class_names(numbered_piece.piece)
    num_characters = 0
    items = _read_checked(source, numbered_piece.piece)
    with open_piece(folder, numbered_piece.piece_index, row_fields.schema) as output:
        for item in record_filter.apply(_count_fields(items, counts["field_names"])):
            if isinstance(item, Rejected):
                output.write_rejected(item)
                counts["rejected"][item.reason] += 1
                continue
            if isinstance(item, Skipped):
                counts["skipped"][item.reason] += 1
                continue
            batch.append(item)
            num_characters += sum(
                len(value) for value in item.fields.values() if isinstance(value, str)
            )
            if len(batch) == RECORDS_PER_BATCH or num_characters > MAX_BATCH_CHARACTERS:
                output.records.write(row_fields.build_batch(batch, counts))
                batch, num_characters = [], 0
        if batch:
            output.records.write(row_fields.build_batch(batch, counts))
    return numbered_piece.piece_index, commit_counts(folder, numbered_piece.piece_index, counts)


def process_pieces(
    pool: ProcessPool,
    folder: Path,
    items: list[NumberedPiece],
    function: Callable[[NumberedPiece], tuple[int, Counts]],
    phase: str,
) -> list[Counts]:
    """Apply a function to the pieces not done in `folder`; return the counts of all.

    Processes the largest pieces first, so that the processes finish at the same time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts_by_number = {item.piece_index: read_counts(folder, item.piece_index) for item in items}
    unfinished = (item for item in items if counts_by_number[item.piece_index] is None)
    pending = sorted(unfinished, key=lambda item: -item.piece.bytes)
    total_bytes = sum(item.piece.bytes for item in items)
    with PhaseProgress(
        phase, total_bytes, total_bytes - sum(item.piece.bytes for item in pending)
    ) as progress:
        for number, piece_counts in pool.map_unordered(function, pending):
            counts_by_number[number] = piece_counts
            progress.advance(items[number].piece.bytes)
    return [counts_by_number[item.piece_index] or {} for item in items]


def read_batches(folder: Path, number: int) -> Iterator[pa.RecordBatch]:
    """Yield the batches in a file of records, memory-mapped and not copied."""
    with pa.memory_map(str(folder / f"{number:06d}.arrow")) as file:
        reader = pa.ipc.open_file(file)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def read_all_batches(folder: Path, num_pieces: int) -> Iterator[pa.RecordBatch]:
    """Yield the batches in the files of all pieces, in order."""
    for index in range(num_pieces):
        yield from read_batches(folder, index)


def read_counts(folder: Path, number: int) -> Counts | None:
    """Return a piece's counts, or None if it is not done; raises DataError for damage."""
    return find_json(folder / f"{number:06d}.json", "remove it")


def commit_counts(folder: Path, number: int, counts: Counts) -> Counts:
    """Write a piece's counts, which marks it as done."""
    write_atomic(folder / f"{number:06d}.json", json.dumps(counts), durable=False)
    return counts


class PieceOutput(NamedTuple):
    """The open files of a piece's records and rejections."""

    records: pa.RecordBatchWriter
    rejected: TextIO

    def write_rejected(self, rejected: Rejected) -> None:
        self.rejected.write(json.dumps(rejected.to_document()) + "\n")


@contextmanager
def open_piece(folder: Path, number: int, schema: pa.Schema) -> Iterator[PieceOutput]:
    """Open the files of a piece for writing; both are renamed when complete."""
    name = f"{number:06d}"
    with (
        replace_atomically(folder / f"{name}.arrow", durable=False) as table,
        replace_atomically(folder / f"{name}.rejected.jsonl", durable=False) as rejected,
        pa.OSFile(str(table), "wb") as sink,
        pa.ipc.new_file(sink, schema) as records,
        rejected.open("w", encoding="utf-8") as lines,
    ):
        yield PieceOutput(records, lines)


def _find_reason(record: Record, limits: Mapping[str, TextLimits]) -> str:
    """Return the first limit violated by a record, or an empty string."""
    for name, limit in limits.items():
        text = record.fields.get(name)
        if isinstance(text, str) and (problem := _check_text(text, limit)):
            return f"'{name}' {problem}"
    return ""


def _check_text(text: str, limit: TextLimits) -> str:
    if len(text) < limit.min_characters:
        return f"under {limit.min_characters} characters"
    if limit.max_characters is not None and len(text) > limit.max_characters:
        return f"over {limit.max_characters} characters"
    if limit.min_words or limit.max_words is not None:
        words = len(text.split())
        if words < limit.min_words:
            return f"under {limit.min_words} words"
        if limit.max_words is not None and words > limit.max_words:
            return f"over {limit.max_words} words"
    return ""


def _read_checked(source: Source, piece: Piece) -> Iterator[SourceItem]:
    """Yield a source's items, with undecodable texts rejected."""
    try:
        yield from map(reject_undecodable, source.read(piece))
    except OSError as error:
        remedy = "make it readable and run again; it resumes"
        raise DataError(f"{piece.name} cannot be read: {error}", remedy) from None


def _count_fields(items: Iterator[SourceItem], counts: Counter[str]) -> Iterator[SourceItem]:
    """Yield the items, and count how many records have each field."""
    for item in items:
        if not isinstance(item, Rejected):
            counts.update(item.fields.keys())
        yield item


def _join_compared(record: Record, layout: Layout) -> str:
    """Return the texts by which a layout compares a record; without texts, the whole record."""
    texts = duplicates.join_compared_texts(layout.select_text_fields(record.fields))
    return texts or duplicates.encode_fields(record.fields)
