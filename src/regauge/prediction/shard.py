"""The three steps of a shard: read and encode its records, compute their outputs, write the files.

Each step takes all that it needs as arguments. So three threads can work on three shards at once,
or one thread can do the steps one after the other.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from regauge.artifacts.postprocess import (
    build_columns,
    build_table,
    write_parquet,
)
from regauge.data.columns import encode_value
from regauge.data.sources import Record, Rejected, Skipped, reject_undecodable
from regauge.data.values import fits_kind
from regauge.files import fsync_paths, replace_atomically, sha256
from regauge.prediction.job import QUARANTINE, SHARDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regauge.artifacts.engine import Engine
    from regauge.artifacts.manifest import ProgramEntry
    from regauge.artifacts.postprocess import Decode
    from regauge.artifacts.preprocess import Preprocessor, TextWords
    from regauge.artifacts.records import TextRecords
    from regauge.data.sources import Piece, Source, SourceItem
    from regauge.data.values import FieldKind, Value
    from regauge.prediction.settings import PredictOutput
    from regauge.prediction.shard_queue import ShardId


@dataclass(frozen=True)
class RecordSpec:
    """The fields of a record to read and to keep, and the size of a shard."""

    text_fields: tuple[str, ...]
    prompt_name: str | None
    """Name of the prompt to prepend to each text; None for the artifact's default prompt."""
    shard_records: int
    """Most records of a shard."""
    kept_fields: dict[str, FieldKind]
    """Fields to copy into the output, with their kinds."""
    output: PredictOutput
    numeric_fields: tuple[str, ...] = ()
    """Numeric features of ranking candidates."""
    categorical_fields: tuple[str, ...] = ()
    """Categorical features of ranking candidates."""
    needs_words: bool = False
    """Whether the outputs are entities, which need the words of a text."""

    @property
    def value_fields(self) -> tuple[str, ...]:
        """The fields whose values are read."""
        names = (*self.kept_fields, *self.numeric_fields, *self.categorical_fields)
        return tuple(dict.fromkeys(names))

    def list_dropped(self, record: Record) -> set[str]:
        """Return the fields of a record that should be copied and are unknown."""
        if self.output.keep_fields != "all":
            return set()
        return record.fields.keys() - {*self.text_fields, *self.value_fields}

    def list_missing(self, record: Record) -> set[str]:
        """Return the fields that the settings name and a record does not have."""
        return (
            set()
            if self.output.keep_fields == "all"
            else self.kept_fields.keys() - record.fields.keys()
        )


@dataclass
class EncodedShard:
    """The tokenized records of a shard, with the counts of its ledger line."""

    shard_id: ShardId
    is_last: bool
    """Whether it is the last shard of its piece."""
    records: TextRecords
    kept_values: dict[str, list[Value | None]]
    quarantined: list[Rejected]
    num_skipped: int
    num_truncated: int
    dropped_fields: Counter[str]
    """Number of records by field that is not copied, because the first records do not have it."""
    missing_fields: Counter[str]
    """Number of records without a value by field that the settings name."""
    words: list[TextWords] = field(default_factory=list)
    """The words of each text, if the outputs are entities."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each step."""
    computed_tokens: int = 0
    """Tokens that were computed, padding included."""


class PieceReader:
    """Reads the pieces of a source in parts of `shard_records` records."""

    def __init__(self, source: Source, pieces: tuple[Piece, ...], record_spec: RecordSpec) -> None:
        self._source = source
        self._pieces = pieces
        self._part_records = record_spec.shard_records
        self._open: tuple[int, int, Iterator[SourceItem]] | None = None
        """The open piece, its next part, and an iterator over its remaining items."""
        self._next_item: SourceItem | None = None
        """The next item of the open piece, read ahead to detect its end; None at the end."""

    def read_part(self, shard: ShardId) -> tuple[list[SourceItem], bool] | None:
        """Return the items of a part and whether it is the last; None if the piece ends before.

        An open piece is read on from its current position; parts before `shard` are skipped.
        """
        current = self._open
        if current is None or current[0] != shard.piece or current[1] > shard.part:
            items = map(reject_undecodable, self._source.read(self._pieces[shard.piece]))
            current = (shard.piece, 0, items)
            self._next_item = next(items, None)
        piece, part, remaining = current
        while part < shard.part and self._next_item is not None:
            self._take_part(remaining)
            part += 1
        exists = part == shard.part and (self._next_item is not None or part == 0)
        taken = self._take_part(remaining) if exists else []
        self._open = piece, part + exists, remaining
        return (taken, self._next_item is None) if exists else None

    def _take_part(self, remaining: Iterator[SourceItem]) -> list[SourceItem]:
        """Return the items of the next part, and read one item ahead."""
        items: list[SourceItem] = []
        while self._next_item is not None and len(items) < self._part_records:
            items.append(self._next_item)
            self._next_item = next(remaining, None)
        return items


def read_shard(
    piece_reader: PieceReader, preprocessor: Preprocessor, record_spec: RecordSpec, shard: ShardId
) -> EncodedShard | None:
    """Read and encode the records of a shard; returns None if its piece ends before it."""
    start = time.perf_counter()
    part = piece_reader.read_part(shard)
    if part is None:
        return None
    items, is_last = part
    columns: list[list[str]] = [[] for _ in record_spec.text_fields]
    values: dict[str, list[Value | None]] = {name: [] for name in record_spec.value_fields}
    dropped_fields: Counter[str] = Counter()
    missing_fields: Counter[str] = Counter()
    quarantined: list[Rejected] = []
    for item in items:
        if isinstance(item, Rejected):
            quarantined.append(item)
        elif isinstance(item, Record):
            if (rejected := _check_record(item, record_spec)) is not None:
                quarantined.append(rejected)
                continue
            for column, name in zip(columns, record_spec.text_fields, strict=True):
                column.append(str(item.fields[name]))
            for name, column_values in values.items():
                column_values.append(item.fields.get(name))
            dropped_fields.update(record_spec.list_dropped(item))
            missing_fields.update(record_spec.list_missing(item))
    encoded = preprocessor.encode_records(columns, record_spec.prompt_name, values)
    kept = {name: values[name] for name in record_spec.kept_fields}
    num_skipped = sum(isinstance(item, Skipped) for item in items)
    encoded_shard = EncodedShard(
        shard,
        is_last,
        encoded.records,
        kept,
        quarantined,
        num_skipped,
        encoded.num_truncated,
        dropped_fields,
        missing_fields,
    )
    if record_spec.needs_words:
        encoded_shard.words = preprocessor.find_words(columns[0])
    encoded_shard.seconds["read"] = time.perf_counter() - start
    return encoded_shard


def compute_shard(engine: Engine, shard: EncodedShard) -> np.ndarray:
    """Return the outputs of the records of a shard, [records, width] fp32."""
    start, tokens_before = time.perf_counter(), engine.computed_tokens
    outputs = engine.compute(shard.records)
    shard.computed_tokens = engine.computed_tokens - tokens_before
    shard.seconds["compute"] = time.perf_counter() - start
    return outputs


@dataclass(frozen=True)
class ShardWriter:
    """Writes the files of shards."""

    folder: Path
    """The output folder."""
    scratch_folder: Path
    """The folder of this job's unfinished files, on the same file system."""
    program: ProgramEntry
    record_spec: RecordSpec
    decode: Decode
    """Converts generated tokens to texts."""

    def write(self, shard: EncodedShard, outputs: np.ndarray) -> dict[str, Any]:
        """Write the files of a shard, each atomically; return its ledger line.

        `outputs` are [records, width] fp32.
        """
        start = time.perf_counter()
        paths = self._write_outputs(shard, outputs)
        quarantine = self._write_quarantine(shard)
        fsync_paths([self.folder / SHARDS])
        hashes = {path.name: sha256(path) for path in paths}
        shard.seconds["write"] = time.perf_counter() - start
        return {
            "piece": shard.shard_id.piece,
            "part": shard.shard_id.part,
            "is_last": shard.is_last,
            "rows": len(shard.records),
            "quarantined": len(shard.quarantined),
            "skipped": shard.num_skipped,
            "truncated": shard.num_truncated,
            "dropped_fields": dict(sorted(shard.dropped_fields.items())),
            "missing_fields": dict(sorted(shard.missing_fields.items())),
            "tokens": shard.records.num_tokens,
            "computed_tokens": shard.computed_tokens,
            "bytes": {path.name: path.stat().st_size for path in paths},
            "sha256": hashes,
            "quarantine_sha256": {path.name: sha256(path) for path in quarantine},
            "seconds": {step: round(seconds, 6) for step, seconds in shard.seconds.items()},
        }

    def _write_outputs(self, shard: EncodedShard, outputs: np.ndarray) -> list[Path]:
        output, name, paths = self.record_spec.output, shard.shard_id.name, []
        columns = build_columns(self.program, output.dtype, outputs, self.decode, shard.words)
        if output.format == "npy":
            array = np.asarray(columns.pop(next(iter(columns))))
            paths.append(self._write_file(SHARDS, f"{name}.npy", lambda file: np.save(file, array)))
        if columns or shard.kept_values:
            table = build_table(columns, shard.kept_values, self.record_spec.kept_fields)
            write = partial(write_parquet, table)
            paths.append(self._write_file(SHARDS, f"{name}.parquet", write))
        return paths

    def _write_quarantine(self, shard: EncodedShard) -> list[Path]:
        """Write the rejected records of a shard; return the file, if there are any.

        The file of an earlier attempt is removed.
        """
        name = f"{shard.shard_id.name}.jsonl"
        if not shard.quarantined:
            (self.folder / QUARANTINE / name).unlink(missing_ok=True)
            return []
        documents = (
            json.dumps(rejected.to_document(), ensure_ascii=False) for rejected in shard.quarantined
        )
        text = "".join(f"{document}\n" for document in documents)
        return [self._write_file(QUARANTINE, name, lambda file: file.write(text.encode()))]

    def _write_file(self, subfolder: str, name: str, write: Callable[[IO[bytes]], object]) -> Path:
        """Write a file in the scratch folder and rename it into the output folder."""
        path = self.folder / subfolder / name
        with (
            replace_atomically(path, self.scratch_folder) as temporary,
            temporary.open("wb") as file,
        ):
            write(file)
        return path


def _check_record(record: Record, record_spec: RecordSpec) -> Rejected | None:
    """Return the reason to reject a record, or None if it is valid."""
    for name in record_spec.text_fields:
        if not isinstance(record.fields.get(name), str):
            return Rejected(record.file, record.location, f"no text in '{name}'")
    for name in record_spec.numeric_fields:
        if (value := record.fields.get(name)) is not None and not _is_number(value):
            return Rejected(record.file, record.location, f"'{name}' is not a number")
    for name, kind in record_spec.kept_fields.items():
        value = record.fields.get(name)
        if value is not None and not fits_kind(value, kind):
            detail = f"{type(value).__name__} {value!r}"[:80]
            return Rejected(record.file, record.location, f"'{name}' is not of type {kind}", detail)
    return None


def _is_number(value: Value) -> bool:
    """Return whether a value can be a numeric feature."""
    try:
        encode_value(value, "float")
    except TypeError:
        return False
    return True
