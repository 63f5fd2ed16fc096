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

from regauge.data import duplicates, reading, tokenizer
from regauge.data.encoding import DECISIONS, DROPPED, DUPLICATE, HELDOUT, REPEAT, TRAIN
from regauge.data.progress import Phase
from regauge.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data import settings

TEXTS_AT_A_TIME = 512


def decide(work: Path, count: int, split: settings.Split, *, drop: bool) -> np.ndarray:
    """Return what becomes of every record of `count` pieces, in order.

    TRAIN, HELDOUT, DUPLICATE (with `drop`: it equals an earlier one) or REPEAT.
    """
    path = work / DECISIONS
    if not path.exists():
        with Phase("split", 0):
            temporary = work / "decisions.unfinished.npy"
            np.save(temporary, _decided(*_identities(work / "read", count), split, drop=drop))
        temporary.replace(path)
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
            share = min(1.0, wanted.sample_mib * 2**20 / max(_text_bytes(work, count), 1))
            tokenizer.train(_texts(work / "read", count, decisions, share), wanted, aside)
    aside.replace(folder)
    return folder


def _identities(folder: Path, count: int) -> tuple[list[bytes], np.ndarray]:
    """Return the content hash and the signature of every record."""
    hashes: list[bytes] = []
    signed = [np.zeros((0, duplicates.HASHES), dtype=np.uint32)]
    for number in range(count):
        for batch in reading.records(folder, number):
            hashes.extend(batch.column("hash").to_pylist())
            values = np.frombuffer(batch.column("signature").buffers()[1], dtype="<u4")
            signed.append(values[: batch.num_rows * duplicates.HASHES].reshape(batch.num_rows, -1))
    return hashes, np.concatenate(signed)


def _decided(
    hashes: list[bytes], signed: np.ndarray, split: settings.Split, *, drop: bool
) -> np.ndarray:  # [records] uint8
    labels = duplicates.clusters(signed, split.similarity)
    decisions = np.full(len(hashes), TRAIN, dtype=np.uint8)
    for number, content in enumerate(duplicates.representatives(labels, hashes)):
        if duplicates.keyed_share(content, split.seed, "heldout") < split.heldout_share:
            decisions[number] = HELDOUT
    if split.repeats == "drop":
        decisions[labels != np.arange(len(labels))] = REPEAT
    if drop:
        seen: set[bytes] = set()
        for number, content in enumerate(hashes):
            if content in seen:
                decisions[number] = DUPLICATE
            seen.add(content)
    return decisions


def _text_bytes(work: Path, count: int) -> int:
    found = (reading.committed(work / "read", number) for number in range(count))
    return sum(counts["text_bytes"] for counts in found if counts)


def _texts(folder: Path, count: int, decisions: np.ndarray, share: float) -> Iterator[list[str]]:
    """Yield batches of the texts to train on, of a keyed share of the records."""
    at, gathered = 0, []
    for number in range(count):
        for batch in reading.records(folder, number):
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
