"""Phase 2 of `prepare`: decides the split of each record, and builds the tokenizer.

Clusters of near-duplicates are made of whole records, independent of the row layout. Two datasets
of one source therefore hold out the same records and train the same tokenizer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from regauge.data import duplicates, tokenizer
from regauge.files import replace_atomically
from regauge.log import logger
from regauge.preparation import read_records
from regauge.preparation.encode import DECISIONS, DROPPED, DUPLICATE, HELDOUT, REPEAT, TRAIN
from regauge.preparation.phase_progress import PhaseProgress
from regauge.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from regauge.data.settings import SplitSettings, TokenizerSettings

TEXTS_PER_BATCH = 512
NO_HASHES = np.zeros((0, duplicates.HASH_BYTES), dtype=np.uint8)


def decide_splits(
    scratch: Path, num_pieces: int, split: SplitSettings, *, drop_duplicates: bool
) -> np.ndarray:
    """Return the decision for every record of the pieces, in order, [records] uint8.

    A decision is TRAIN, HELDOUT, REPEAT (a near-duplicate), or DUPLICATE (with `drop_duplicates`:
    the record equals an earlier one).
    """
    path = scratch / DECISIONS
    if not path.exists():
        with (
            PhaseProgress("split", 0),
            replace_atomically(path, durable=False) as temporary,
            temporary.open("wb") as file,
        ):
            records = scratch / "read"
            decided = _compute_decisions(
                records, num_pieces, split, drop_duplicates=drop_duplicates
            )
            np.save(file, decided)
    decisions: np.ndarray = np.load(path)
    parts = [f"{len(decisions)} records, {(decisions == HELDOUT).sum()} held out"]
    for decision, name in DROPPED.items():
        if num_dropped := int((decisions == decision).sum()):
            parts.append(f"{num_dropped} {name}s dropped")
    logger.info(", ".join(parts))
    return decisions


def build_tokenizer(
    scratch: Path, num_pieces: int, settings: TokenizerSettings, decisions: np.ndarray
) -> Path:
    """Return the folder of the tokenizer, which is copied, or trained on the training records."""
    folder = scratch / "tokenizer"
    if folder.exists():
        return folder
    unfinished = scratch / "tokenizer.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    with PhaseProgress("tokenizer", 0):
        if settings.path:
            tokenizer.copy_tokenizer(Path(settings.path), unfinished)
        else:
            text_bytes = max(_count_text_bytes(scratch, num_pieces), 1)
            fraction = min(1.0, settings.sample_mib * MIB / text_bytes)
            texts = _sample_texts(scratch / "read", num_pieces, decisions, fraction)
            tokenizer.train_tokenizer(texts, settings, unfinished)
    unfinished.replace(folder)
    return folder


def _read_column(folder: Path, num_pieces: int, name: str, dtype: np.dtype) -> list[np.ndarray]:
    """Return a column of all records as views of the mapped files."""
    batches = (
        batch for index in range(num_pieces) for batch in read_records.read_batches(folder, index)
    )
    return [_view_column(batch, name, dtype) for batch in batches]


def _view_column(batch: pa.RecordBatch, name: str, dtype: np.dtype) -> np.ndarray:
    """Return a binary column of fixed width as an array with a row for each record."""
    column = batch.column(name)
    width = column.type.byte_width // dtype.itemsize
    values = np.frombuffer(column.buffers()[1], dtype=dtype, count=batch.num_rows * width)
    rows: np.ndarray = values.reshape(batch.num_rows, width)
    return rows


def _compute_decisions(
    folder: Path, num_pieces: int, split: SplitSettings, *, drop_duplicates: bool
) -> np.ndarray:  # [records] uint8
    hashes = np.concatenate([NO_HASHES, *_read_column(folder, num_pieces, "hash", np.dtype("u1"))])
    if split.needs_signatures:
        signatures = duplicates.SignatureTable(
            _read_column(folder, num_pieces, "signature", np.dtype("<u4"))
        )
        labels = duplicates.find_clusters(signatures, split.similarity)
    else:
        labels = duplicates.find_equal_records(hashes)
    decisions = np.full(len(hashes), TRAIN, dtype=np.uint8)
    if split.group_by is None:
        is_heldout = _hold_out_clusters(labels, hashes, split)
    else:
        is_heldout = _hold_out_groups(folder, num_pieces, hashes, split)
    decisions[is_heldout] = HELDOUT
    if split.near_duplicates == "drop":
        decisions[labels != np.arange(len(labels))] = REPEAT
    if drop_duplicates:
        decisions[duplicates.find_equal_records(hashes) != np.arange(len(hashes))] = DUPLICATE
    return decisions


def _hold_out_clusters(labels: np.ndarray, hashes: np.ndarray, split: SplitSettings) -> np.ndarray:
    """Return for every record whether its cluster is held out."""
    representatives = duplicates.find_representatives(labels, hashes)
    is_heldout = np.zeros(len(hashes), dtype=bool)
    for record in np.unique(representatives).tolist():
        draw = duplicates.draw_uniform(hashes[record].tobytes(), split.seed, "heldout")
        is_heldout[record] = draw < split.heldout_fraction
    result: np.ndarray = is_heldout[representatives]
    return result


def _hold_out_groups(
    folder: Path, num_pieces: int, hashes: np.ndarray, split: SplitSettings
) -> np.ndarray:
    """Return for every record whether the value of its group field is held out.

    A record without a value is decided by its hash.
    """
    is_heldout: list[bool] = []
    for index in range(num_pieces):
        for batch in read_records.read_batches(folder, index):
            for text in batch.column("fields").to_pylist():
                value = json.loads(text).get(split.group_by)
                key = hashes[len(is_heldout)].tobytes() if value is None else str(value).encode()
                draw = duplicates.draw_uniform(key, split.seed, "heldout")
                is_heldout.append(draw < split.heldout_fraction)
    return np.array(is_heldout, dtype=bool)


def _count_text_bytes(scratch: Path, num_pieces: int) -> int:
    counts = (read_records.read_counts(scratch / "read", index) for index in range(num_pieces))
    return sum(piece_counts["text_bytes"] for piece_counts in counts if piece_counts)


def _sample_texts(
    folder: Path, num_pieces: int, decisions: np.ndarray, fraction: float
) -> Iterator[list[str]]:
    """Yield batches of training texts from a keyed sample of the records."""
    start, texts = 0, []
    for index in range(num_pieces):
        for batch in read_records.read_batches(folder, index):
            batch_decisions = decisions[start : start + batch.num_rows]
            start += batch.num_rows
            for row in np.flatnonzero(batch_decisions == TRAIN).tolist():
                content_hash = batch.column("hash")[row].as_py()
                if duplicates.draw_uniform(content_hash, 0, "tokenizer") < fraction:
                    fields = json.loads(batch.column("fields")[row].as_py())
                    texts.append(duplicates.join_texts(fields))
            if len(texts) >= TEXTS_PER_BATCH:
                yield texts
                texts = []
    yield texts
