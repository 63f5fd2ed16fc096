"""One shard: its records read and encoded, answered, and written; each step beside the others'.

What a step needs is handed over, so that three threads, or one after the other, can do them.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from regauge.artifacts import postprocess
from regauge.data.sources import Record, Rejected, Skipped, legible
from regauge.files import flush, replacing, sha256
from regauge.prediction.job import QUARANTINE, SHARDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regauge.artifacts.engine import Engine
    from regauge.artifacts.manifest import Program
    from regauge.artifacts.output_settings import Written
    from regauge.artifacts.postprocess import Decode
    from regauge.artifacts.preprocess import Reader
    from regauge.artifacts.rows import Rows
    from regauge.data.sources import Found, Piece, Source, Value
    from regauge.prediction.shard_queue import Shard


@dataclass(frozen=True)
class Asked:
    """What is asked of every record."""

    texts: tuple[str, ...]
    """Fields with its texts."""
    prompt: str | None
    """Name of what is put before each of them, if not the artifact's own."""
    rows: int
    """Records of a shard."""
    kept: dict[str, str]
    """Fields that stand beside an answer: "text", "integer" or "real"."""
    output: Written
    numbers: tuple[str, ...] = ()
    """Fields with numbers that are read, too."""
    categories: tuple[str, ...] = ()
    """Fields that name a kind, and are read, too."""


@dataclass
class Taken:
    """Records of a shard, encoded."""

    shard: Shard
    last: bool
    """Whether the piece ends with them."""
    rows: Rows
    kept: dict[str, list[Value | None]]
    quarantined: list[Rejected]
    skipped: int
    truncated: int
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each step."""
    slots: int = 0


class Shelf:
    """The pieces of a source, read in parts."""

    def __init__(self, source: Source, pieces: tuple[Piece, ...], asked: Asked) -> None:
        self._source = source
        self._pieces = pieces
        self._asked = asked
        self._open: tuple[int, int, Iterator[Found]] | None = None
        """A piece that is read, the part that comes next, and what is left of it."""
        self._ahead: Found | None = None

    def take(self, shard: Shard) -> tuple[list[Found], bool] | None:
        """Return what a part of a piece holds, and whether it is the last; None behind the end.

        A piece that is open is read on where it is; parts before a later one are passed over.
        """
        found = self._open
        if found is None or found[0] != shard.piece or found[1] > shard.part:
            records = map(legible, self._source.read(self._pieces[shard.piece]))
            found = (shard.piece, 0, records)
            self._ahead = next(found[2], None)
        piece, part, left = found
        while part < shard.part and self._ahead is not None:
            self._next(left)
            part += 1
        begun = part == shard.part and (self._ahead is not None or part == 0)
        several = self._next(left) if begun else []
        self._open = piece, part + begun, left
        return (several, self._ahead is None) if begun else None

    def _next(self, left: Iterator[Found]) -> list[Found]:
        """Return the next records, and look at the one behind them."""
        several: list[Found] = []
        while self._ahead is not None and len(several) < self._asked.rows:
            several.append(self._ahead)
            self._ahead = next(left, None)
        return several


def read(shelf: Shelf, reader: Reader, asked: Asked, shard: Shard) -> Taken | None:
    """Read and encode the records of a shard; None where the piece ends before it."""
    began = time.perf_counter()
    found = shelf.take(shard)
    if found is None:
        return None
    several, last = found
    columns: list[list[str]] = [[] for _ in asked.texts]
    named = dict.fromkeys((*asked.kept, *asked.numbers, *asked.categories))
    values: dict[str, list[Value | None]] = {name: [] for name in named}
    bad: list[Rejected] = []
    for each in several:
        if isinstance(each, Rejected):
            bad.append(each)
        elif isinstance(each, Record):
            if (problem := _problem(each, asked)) is not None:
                bad.append(problem)
                continue
            for column, name in zip(columns, asked.texts, strict=True):
                column.append(str(each.fields[name]))
            for name, found_values in values.items():
                found_values.append(each.fields.get(name))
    ids, truncated = reader.read(columns, asked.prompt, values)
    kept = {name: values[name] for name in asked.kept}
    skipped = sum(isinstance(each, Skipped) for each in several)
    taken = Taken(shard, last, ids, kept, bad, skipped, truncated)
    taken.seconds["read"] = time.perf_counter() - began
    return taken


def compute(engine: Engine, taken: Taken) -> np.ndarray:
    """Return the answers to the records of a shard, [records, width] fp32."""
    began, before = time.perf_counter(), engine.slots
    found = engine.answers(taken.rows)
    taken.slots = engine.slots - before
    taken.seconds["compute"] = time.perf_counter() - began
    return found


@dataclass(frozen=True)
class Writer:
    """Where answers go."""

    folder: Path
    aside: Path
    """A folder beside it that one job alone writes."""
    program: Program
    asked: Asked
    decode: Decode
    """Makes texts of the tokens of a program that writes."""

    def write(self, taken: Taken, found: np.ndarray) -> dict[str, Any]:
        """Write the files of a shard, each at once; return the line that says that they are there.

        `found` are the answers, [records, width] fp32.
        """
        began = time.perf_counter()
        written = self._answers(taken, found)
        self._quarantine(taken)
        flush([self.folder / SHARDS])
        hashes = {path.name: sha256(path) for path in written}
        taken.seconds["write"] = time.perf_counter() - began
        return {
            "piece": taken.shard.piece,
            "part": taken.shard.part,
            "last": taken.last,
            "rows": len(taken.rows),
            "quarantined": len(taken.quarantined),
            "skipped": taken.skipped,
            "truncated": taken.truncated,
            "tokens": taken.rows.tokens,
            "slots": taken.slots,
            "bytes": {path.name: path.stat().st_size for path in written},
            "sha256": hashes,
            "seconds": {part: round(took, 6) for part, took in taken.seconds.items()},
        }

    def _answers(self, taken: Taken, found: np.ndarray) -> list[Path]:
        output, name, written = self.asked.output, taken.shard.name, []
        columns = postprocess.columns(self.program, output.dtype, found, self.decode)
        if output.format == "npy":
            array = np.asarray(columns.pop(next(iter(columns))))
            written.append(self._put(SHARDS, f"{name}.npy", lambda file: np.save(file, array)))
        if columns or taken.kept:
            table = postprocess.table(columns, taken.kept, self.asked.kept)
            write = partial(postprocess.put, table)
            written.append(self._put(SHARDS, f"{name}.parquet", write))
        return written

    def _quarantine(self, taken: Taken) -> None:
        """Write the records that could not be answered; remove what was written of them before."""
        name = f"{taken.shard.name}.jsonl"
        if not taken.quarantined:
            (self.folder / QUARANTINE / name).unlink(missing_ok=True)
            return
        documents = (json.dumps(each._asdict(), ensure_ascii=False) for each in taken.quarantined)
        text = "".join(f"{document}\n" for document in documents)
        self._put(QUARANTINE, name, lambda file: file.write(text.encode()))

    def _put(self, room: str, name: str, write: Callable[[IO[bytes]], object]) -> Path:
        """Write a file as a whole; what is not finished lies in the folder of this job."""
        path = self.folder / room / name
        with replacing(path, self.aside) as temporary, temporary.open("wb") as file:
            write(file)
        return path


def _problem(record: Record, asked: Asked) -> Rejected | None:
    """Return why a record cannot be answered, or None."""
    for name in asked.texts:
        if not isinstance(record.fields.get(name), str):
            return Rejected(record.file, record.place, f"no text in '{name}'")
    for name in asked.numbers:
        if not _fits(record.fields.get(name, 0), "real"):
            return Rejected(record.file, record.place, f"'{name}' is no number")
    for name, kind in asked.kept.items():
        value = record.fields.get(name)
        if value is not None and not _fits(value, kind):
            detail = f"{type(value).__name__} {value!r}"[:80]
            return Rejected(record.file, record.place, f"'{name}' is no {kind}", detail)
    return None


def _fits(value: Value, kind: str) -> bool:
    if kind == "text":
        return isinstance(value, str)
    if isinstance(value, float):
        return kind == "real"
    return isinstance(value, int) and abs(value) < postprocess.MOST[kind]
