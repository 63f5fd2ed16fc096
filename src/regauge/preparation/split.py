"""Phase two of `prepare`: what becomes of each record, and the tokenizer of those to train on.

Clusters are of whole records, whatever the rows are made of, so that two datasets of one source
hold out the same records and train the same tokenizer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from regauge.data import duplicates, tokenizer
from regauge.files import replacing
from regauge.log import logger
from regauge.preparation import read_records
from regauge.preparation.encode import DECISIONS, DROPPED, DUPLICATE, HELDOUT, REPEAT, TRAIN
from regauge.preparation.progress import Phase
from regauge.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from regauge.data import settings

TEXTS_AT_A_TIME = 512
NO_HASHES = np.zeros((0, duplicates.HASH_BYTES), dtype=np.uint8)


def decide(work: Path, count: int, split: settings.Split, *, drop: bool) -> np.ndarray:
    """Return what becomes of every record of `count` pieces, in order.

    TRAIN, HELDOUT, DUPLICATE (with `drop`: it equals an earlier one) or REPEAT.
    """
    path = work / DECISIONS
    if not path.exists():
        with (
            Phase("split", 0),
            replacing(path, durable=False) as temporary,
            temporary.open("wb") as file,
        ):
            np.save(file, _decided(work / "read", count, split, drop=drop))
    decisions: np.ndarray = np.load(path)
    told = [f"{len(decisions)} records, {(decisions == HELDOUT).sum()} held out"]
    for decision, what in DROPPED.items():
        if dropped := int((decisions == decision).sum()):
            told.append(f"{dropped} {what}s dropped")
    logger.info(", ".join(told))
    return decisions


def make_tokenizer(
    work: Path, count: int, wanted: settings.Tokenizer, decisions: np.ndarray
) -> Path:
    """Return the folder of the tokenizer: loaded, or trained on the records to train on."""
    folder = work / "tokenizer"
    if folder.exists():
        return folder
    aside = work / "tokenizer.unfinished"
    shutil.rmtree(aside, ignore_errors=True)
    with Phase("tokenizer", 0):
        if wanted.path:
            tokenizer.copy(Path(wanted.path), aside)
        else:
            share = min(1.0, wanted.sample_mib * MIB / max(_text_bytes(work, count), 1))
            tokenizer.train(_texts(work / "read", count, decisions, share), wanted, aside)
    aside.replace(folder)
    return folder


def _columns(folder: Path, count: int, name: str, kind: np.dtype) -> list[np.ndarray]:
    """Return a column of all records, as it lies in their files."""
    batches = (batch for number in range(count) for batch in read_records.records(folder, number))
    return [_rows(batch, name, kind) for batch in batches]


def _rows(batch: pa.RecordBatch, name: str, kind: np.dtype) -> np.ndarray:
    """Return a column of bytes of one length, a row for each record."""
    column = batch.column(name)
    width = column.type.byte_width // kind.itemsize
    values = np.frombuffer(column.buffers()[1], dtype=kind, count=batch.num_rows * width)
    rows: np.ndarray = values.reshape(batch.num_rows, width)
    return rows


def _decided(
    folder: Path, count: int, split: settings.Split, *, drop: bool
) -> np.ndarray:  # [records] uint8
    hashes = np.concatenate([NO_HASHES, *_columns(folder, count, "hash", np.dtype("u1"))])
    if split.compares_words:
        signed = duplicates.Signatures(_columns(folder, count, "signature", np.dtype("<u4")))
        labels = duplicates.clusters(signed, split.similarity)
    else:
        labels = duplicates.equal(hashes)
    decisions = np.full(len(hashes), TRAIN, dtype=np.uint8)
    if split.by is None:
        held = _held_out(labels, hashes, split)
    else:
        held = _held_out_by(folder, count, hashes, split)
    decisions[held] = HELDOUT
    if split.repeats == "drop":
        decisions[labels != np.arange(len(labels))] = REPEAT
    if drop:
        decisions[duplicates.equal(hashes) != np.arange(len(hashes))] = DUPLICATE
    return decisions


def _held_out(labels: np.ndarray, hashes: np.ndarray, split: settings.Split) -> np.ndarray:
    """Return which records are of a cluster that is held out."""
    owners = duplicates.representatives(labels, hashes)
    held = np.zeros(len(hashes), dtype=bool)
    for number in np.unique(owners).tolist():
        share = duplicates.keyed_share(hashes[number].tobytes(), split.seed, "heldout")
        held[number] = share < split.heldout_share
    within: np.ndarray = held[owners]
    return within


def _held_out_by(folder: Path, count: int, hashes: np.ndarray, split: settings.Split) -> np.ndarray:
    """Return which records are held out by the value of a field, or without it by their hash."""
    held: list[bool] = []
    for number in range(count):
        for batch in read_records.records(folder, number):
            for text in batch.column("fields").to_pylist():
                value = json.loads(text).get(split.by)
                own = hashes[len(held)].tobytes() if value is None else str(value).encode()
                share = duplicates.keyed_share(own, split.seed, "heldout")
                held.append(share < split.heldout_share)
    return np.array(held, dtype=bool)


def _text_bytes(work: Path, count: int) -> int:
    found = (read_records.committed(work / "read", number) for number in range(count))
    return sum(counts["text_bytes"] for counts in found if counts)


def _texts(folder: Path, count: int, decisions: np.ndarray, share: float) -> Iterator[list[str]]:
    """Yield batches of the texts to train on, of a keyed share of the records."""
    at, gathered = 0, []
    for number in range(count):
        for batch in read_records.records(folder, number):
            verdicts = decisions[at : at + batch.num_rows]
            at += batch.num_rows
            for place in np.flatnonzero(verdicts == TRAIN).tolist():
                content = batch.column("hash")[place].as_py()
                if duplicates.keyed_share(content, 0, "tokenizer") < share:
                    fields = json.loads(batch.column("fields")[place].as_py())
                    gathered.append(duplicates.whole_text(fields))
            if len(gathered) >= TEXTS_AT_A_TIME:
                yield gathered
                gathered = []
    yield gathered
