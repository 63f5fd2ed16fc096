"""A shard's three steps: read and encode records, compute outputs, write files.

Each step takes everything as arguments, so three threads can work on three shards at once, or one
thread can do the steps one after the other.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from regauge.data.chat_templates import TemplateError
from regauge.data.columns import encode_value
from regauge.data.conversations import ConversationError
from regauge.data.sources import Record, Rejected, Skipped, reject_undecodable
from regauge.data.values import fits_kind, is_word_list
from regauge.inference.export.engine import NON_FINITE
from regauge.inference.export.generator import add_draws
from regauge.inference.export.postprocess import build_columns
from regauge.inference.predict.job import QUARANTINE, SHARDS
from regauge.inference.predict.shard_files import ShardColumns
from regauge.models.settings import GREEDY
from regauge.system.files import fsync_paths, replace_atomically, sha256

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from regauge.data.sources import Piece, Source, SourceItem
    from regauge.data.values import FieldKind, Value
    from regauge.inference.export.engine import Engine
    from regauge.inference.export.manifest import ProgramEntry
    from regauge.inference.export.postprocess import Decode
    from regauge.inference.export.preprocess import EncodedRecords, Preprocessor, TextWords
    from regauge.inference.export.records import TextRecords
    from regauge.inference.predict.fields import InputFields
    from regauge.inference.predict.settings import PredictOutput
    from regauge.inference.predict.shard_queue import ShardId
    from regauge.models.settings import Generation


@dataclass(frozen=True)
class RecordSpec:
    """Record fields to read and to keep, and the shard size."""

    inputs: InputFields
    prompt_name: str | None
    """Prompt to prepend to each text; None for the artifact's default prompt."""
    shard_records: int
    """Maximum records per shard."""
    kept_fields: dict[str, FieldKind]
    """Fields to copy into the output -> kind."""
    output: PredictOutput
    numeric_fields: tuple[str, ...] = ()
    """Numeric features of ranking candidates."""
    categorical_fields: tuple[str, ...] = ()
    """Categorical features of ranking candidates."""
    generation: Generation = GREEDY
    num_new_tokens: int = 0
    """Maximum tokens per answer."""
    needs_words: bool = False
    """Whether the outputs are entities, which need a text's words."""

    @property
    def value_fields(self) -> tuple[str, ...]:
        """Fields whose values are read."""
        names = (*self.kept_fields, *self.numeric_fields, *self.categorical_fields)
        return tuple(dict.fromkeys(names))

    def list_dropped(self, record: Record) -> set[str]:
        """Return a record's unknown fields that should be copied."""
        if self.output.keep_fields != "all":
            return set()
        return record.fields.keys() - {*self.inputs.read_fields, *self.value_fields}

    def list_missing(self, record: Record) -> set[str]:
        """Return the fields named in the settings but missing from a record."""
        return (
            set()
            if self.output.keep_fields == "all"
            else self.kept_fields.keys() - record.fields.keys()
        )


@dataclass
class EncodedShard:
    """A shard's tokenized records, with counts for the ledger line."""

    shard_id: ShardId
    is_last: bool
    """Whether it is the last shard in its piece."""
    source_bytes: int
    """Estimate of the piece's bytes that the shard has read."""
    records: TextRecords = field(init=False)
    origins: list[tuple[str, str]] = field(default_factory=list)
    """Each record's file, and its location there."""
    kept_values: dict[str, list[Value | None]] = field(default_factory=dict)
    quarantined: list[Rejected] = field(default_factory=list)
    num_skipped: int = 0
    num_truncated: int = 0
    dropped_fields: Counter[str] = field(default_factory=Counter)
    """Field -> records where it is not copied, because it is missing from the first records."""
    missing_fields: Counter[str] = field(default_factory=Counter)
    """Field named in the settings -> records without a value."""
    words: list[TextWords] = field(default_factory=list)
    """Each text's words, if the outputs are entities."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Each step's duration."""
    computed_tokens: int = 0
    """Computed tokens, padding included."""


class PieceReader:
    """Reads source pieces in parts of `shard_records` records."""

    def __init__(self, source: Source, pieces: tuple[Piece, ...], record_spec: RecordSpec) -> None:
        self._source = source
        self._pieces = pieces
        self._part_records = record_spec.shard_records
        self._open: tuple[int, int, Iterator[SourceItem]] | None = None
        """The open piece, the next part, and an iterator over the remaining items."""
        self._next_item: SourceItem | None = None
        """Next item in the open piece, read ahead to detect the end; None at the end."""

    def read_part(self, shard: ShardId) -> tuple[list[SourceItem], bool] | None:
        """Return a part's items and whether it is the last; None if the piece ends before.

        An open piece is read on from the current position; parts before `shard` are skipped.
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

    def estimate_bytes(self, shard: ShardId, items: Iterable[SourceItem]) -> int:
        """Estimate the bytes of items in their piece, from their values as JSON."""
        piece = self._pieces[shard.piece]
        values = (item.fields for item in items if not isinstance(item, Rejected))
        lines = (json.dumps(fields, ensure_ascii=False) for fields in values)
        num_bytes = sum(len(line.encode(errors="replace")) for line in lines)
        return min(piece.bytes, round(num_bytes * piece.bytes / max(piece.text_bytes, 1)))

    def _take_part(self, remaining: Iterator[SourceItem]) -> list[SourceItem]:
        """Return the next part's items, and read one item ahead."""
        items: list[SourceItem] = []
        while self._next_item is not None and len(items) < self._part_records:
            items.append(self._next_item)
            self._next_item = next(remaining, None)
        return items


class _ShardRecords:
    def __init__(
        self, preprocessor: Preprocessor, record_spec: RecordSpec, shard: EncodedShard
    ) -> None:
        """Take the shard to count and quarantine the other records in."""
        self._preprocessor = preprocessor
        self._record_spec = record_spec
        self._shard = shard
        self.columns: list[list[str]] = [[] for _ in record_spec.inputs.text_fields]
        """Each text field's texts; for conversations the rendered texts."""
        self.values: dict[str, list[Value | None]] = {name: [] for name in record_spec.value_fields}
        self.numbers: list[int] = []
        """Record numbers in the piece."""
        self.word_lists: list[list[str]] = []
        """Each record's words; empty for a text."""

    def add(self, item: SourceItem, number: int) -> None:
        """Add a source item; `number` is the item's number in the piece."""
        if isinstance(item, Skipped):
            self._shard.num_skipped += 1
            return
        texts = item if isinstance(item, Rejected) else self._read_texts(item)
        if isinstance(texts, Rejected):
            self._shard.quarantined.append(texts)
        elif isinstance(item, Record):
            self._add_record(item, texts, number)

    def _add_record(self, record: Record, texts: list[str], number: int) -> None:
        for column, text in zip(self.columns, texts, strict=True):
            column.append(text)
        for name, column_values in self.values.items():
            column_values.append(record.fields.get(name))
        self.numbers.append(number)
        self._shard.origins.append((record.file, record.location))
        words = record.fields.get(self._record_spec.inputs.text_fields[0])
        self.word_lists.append(words if is_word_list(words) else [])
        self._shard.dropped_fields.update(self._record_spec.list_dropped(record))
        self._shard.missing_fields.update(self._record_spec.list_missing(record))

    def encode(self) -> EncodedRecords:
        if self._record_spec.inputs.is_conversation:
            return self._preprocessor.encode_requests(self.columns[0])
        prompt = self._record_spec.prompt_name
        return self._preprocessor.encode_records(self.columns, prompt, self.values)

    def _read_texts(self, record: Record) -> list[str] | Rejected:
        """Return a record's texts, or the reason to reject it."""
        inputs = self._record_spec.inputs
        texts = [record.fields.get(name) for name in inputs.text_fields]
        if inputs.is_conversation:
            rendered = self._render_conversation(record)
            if isinstance(rendered, Rejected):
                return rendered
            texts = [rendered]
        if self._record_spec.needs_words:
            texts = [" ".join(text) if is_word_list(text) else text for text in texts]
        for name, text in zip(inputs.text_fields, texts, strict=True):
            if not isinstance(text, str):
                return Rejected(record.file, record.location, f"no text in '{name}'")
        return _check_values(record, self._record_spec) or [str(text) for text in texts]

    def _render_conversation(self, record: Record) -> str | Rejected:
        try:
            return self._preprocessor.render_request(record.fields)
        except ConversationError as error:
            return Rejected(record.file, record.location, error.reason, error.detail)
        except TemplateError as error:
            reason = "the chat template cannot render it"
            return Rejected(record.file, record.location, reason, str(error))


def read_shard(
    piece_reader: PieceReader, preprocessor: Preprocessor, record_spec: RecordSpec, shard: ShardId
) -> EncodedShard | None:
    """Read and encode a shard's records; returns None if the piece ends before it."""
    start = time.perf_counter()
    part = piece_reader.read_part(shard)
    if part is None:
        return None
    items, is_last = part
    encoded_shard = EncodedShard(shard, is_last, piece_reader.estimate_bytes(shard, items))
    batch = _ShardRecords(preprocessor, record_spec, encoded_shard)
    for number, item in enumerate(items, start=shard.part * record_spec.shard_records):
        batch.add(item, number)
    encoded = batch.encode()
    encoded_shard.records = add_draws(
        encoded.records,
        record_spec.generation,
        np.array(batch.numbers, np.int64),
        count=record_spec.num_new_tokens,
        piece=shard.piece,
    )
    encoded_shard.num_truncated = encoded.num_truncated
    encoded_shard.kept_values = {name: batch.values[name] for name in record_spec.kept_fields}
    if record_spec.needs_words:
        texts, prompt = batch.columns[0], record_spec.prompt_name
        encoded_shard.words = preprocessor.find_words(texts, prompt, batch.word_lists)
    encoded_shard.seconds["read"] = time.perf_counter() - start
    return encoded_shard


def compute_shard(engine: Engine, shard: EncodedShard) -> np.ndarray:
    """Return the outputs of a shard's records, [records, width] fp32."""
    start, tokens_before = time.perf_counter(), engine.computed_tokens
    outputs = engine.compute(shard.records)
    shard.computed_tokens = engine.computed_tokens - tokens_before
    shard.seconds["compute"] = time.perf_counter() - start
    return outputs


def quarantine_non_finite(shard: EncodedShard, outputs: np.ndarray) -> np.ndarray:
    """Reject the records with a NaN or infinite output; return the other outputs."""
    is_finite = np.isfinite(outputs).all(1)
    if is_finite.all():
        return outputs
    kept, lost = np.flatnonzero(is_finite), np.flatnonzero(~is_finite)
    shard.quarantined += [Rejected(*shard.origins[index], NON_FINITE) for index in lost]
    shard.words = [shard.words[index] for index in kept if shard.words]
    shard.kept_values = {
        name: [values[index] for index in kept] for name, values in shard.kept_values.items()
    }
    return outputs[kept]


@dataclass(frozen=True)
class ShardWriter:
    folder: Path
    scratch_folder: Path
    """Folder for this job's unfinished files, on the same file system."""
    program: ProgramEntry
    record_spec: RecordSpec
    decode: Decode
    """Converts generated tokens to texts."""

    def write(self, shard: EncodedShard, outputs: np.ndarray) -> dict[str, Any]:
        """Write a shard's files, each atomically; return the ledger line.

        `outputs` are [records, width] fp32.
        """
        start = time.perf_counter()
        outputs = quarantine_non_finite(shard, outputs)
        paths = self._write_outputs(shard, outputs)
        quarantine = self._write_quarantine(shard)
        fsync_paths([self.folder / SHARDS])
        hashes = {path.name: sha256(path) for path in paths}
        shard.seconds["write"] = time.perf_counter() - start
        return {
            "piece": shard.shard_id.piece,
            "part": shard.shard_id.part,
            "is_last": shard.is_last,
            "source_bytes": shard.source_bytes,
            "rows": len(outputs),
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
        output, name = self.record_spec.output, shard.shard_id.name
        outputs_by_name = build_columns(
            self.program, output.dtype, outputs, self.decode, shard.words
        )
        columns = ShardColumns(shard.kept_values, self.record_spec.kept_fields, outputs_by_name)
        return [
            self._write_file(SHARDS, f"{name}.{suffix}", write)
            for suffix, write in columns.list_files(output.format).items()
        ]

    def _write_quarantine(self, shard: EncodedShard) -> list[Path]:
        """Write a shard's rejected records; return the file, if there are any.

        Removes an earlier attempt's file.
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
        path = self.folder / subfolder / name
        with (
            replace_atomically(path, self.scratch_folder) as temporary,
            temporary.open("wb") as file,
        ):
            write(file)
        return path


def _check_values(record: Record, record_spec: RecordSpec) -> Rejected | None:
    """Return the reason to reject a record's values, or None if they are valid."""
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
    try:
        encode_value(value, "float")
    except TypeError:
        return False
    return True
