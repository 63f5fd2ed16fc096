"""A folder of answers while they are made: what it is of, and which shards are finished.

    job.json                      everything that decides the answers: another job is refused
    shards/000012-00003.parquet   the answers to part 3 of piece 12, in the order of the records
    quarantine/000012-00003.jsonl records of it that could not be answered, each with its reason
    jobs/0-of-1/ledger.jsonl      a line for each shard: rows, hash, tokens, seconds; it is finished
                                  once its line is there
    jobs/0-of-1/attempts.jsonl    what was paid for
    result.json                   the sums over all, once nothing is left

A file is written aside, flushed and renamed, and then its line is written: a job that is killed
loses what it was at, and nothing else. Several jobs write one folder, each its own share of the
pieces and its own ledger.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import config, jsonl
from regauge.artifacts.manifest import MANIFEST
from regauge.config import FORMAT
from regauge.errors import DataError, SettingsError
from regauge.files import sha256, write_json
from regauge.prediction.shard_queue import Shard
from regauge.supervision.cost_meter import ATTEMPTS, Reading, last_seen, paid, reading
from regauge.units import MILLION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from regauge.artifacts.artifact import Artifact
    from regauge.data.sources import Piece
    from regauge.prediction.settings import Predicting

JOB, LEDGER, RESULT = "job.json", "ledger.jsonl", "result.json"
SHARDS, QUARANTINE, JOBS = "shards", "quarantine", "jobs"
OTHER = "name another output.folder, or delete that one"


@dataclass(frozen=True)
class Place:
    """Which of several equal jobs this is."""

    index: int = 0
    count: int = 1

    def has(self, piece: int) -> bool:
        """Return whether a piece is of this job's share."""
        return piece % self.count == self.index


@dataclass(frozen=True)
class Job:
    """A job with the pieces of its source."""

    settings: Predicting
    pieces: tuple[Piece, ...]
    place: Place

    @property
    def folder(self) -> Path:
        """Where all answers go."""
        return Path(self.settings.output.folder)

    @property
    def own(self) -> Path:
        """What this job alone writes."""
        return self.folder / JOBS / f"{self.place.index}-of-{self.place.count}"

    @property
    def share(self) -> tuple[int, ...]:
        """The numbers of this job's pieces."""
        return tuple(filter(self.place.has, range(len(self.pieces))))

    def check(self, facts: dict[str, Any]) -> None:
        """Raise DataError for a folder with other answers than `facts` say, or anything else."""
        document = json.loads(json.dumps(facts))
        if (known := _stored(self.folder)) is not None:
            self._compare(document, {name: known.get(name) for name in document})

    def begin(self, facts: dict[str, Any]) -> None:
        """Take the folder for answers of which `facts` say everything that decides them.

        Raises DataError where it has others, or anything else.
        """
        document = json.loads(json.dumps({"format": FORMAT, **facts}))
        if (known := _stored(self.folder)) is None:
            for name in (SHARDS, QUARANTINE):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            self._put(document)
            known = _stored(self.folder)
        self._compare(document, known)

    def _compare(self, document: dict[str, Any], known: dict[str, Any] | None) -> None:
        if known != document:
            difference = config.first_difference("", document, known)
            raise DataError(f"{self.folder} has other answers: {difference}", OTHER)

    def _put(self, document: dict[str, Any]) -> None:
        """Write what the folder is of, unless another job has done so meanwhile."""
        aside = self.own / JOB
        self.own.mkdir(parents=True, exist_ok=True)
        write_json(aside, document)
        with suppress(FileExistsError):
            os.link(aside, self.folder / JOB)
        aside.unlink()

    def finished(self) -> dict[Shard, dict[str, Any]]:
        """Return the lines of all finished shards; what a line tells of and is gone is not."""
        found: dict[Shard, dict[str, Any]] = {}
        for path in sorted((self.folder / JOBS).glob(f"*/{LEDGER}")):
            for line in jsonl.whole(path):
                if self._is_there(line):
                    found[Shard(line["piece"], line["part"])] = line
        return found

    def commit(self, line: Mapping[str, Any]) -> None:
        """Write the line of a shard whose files lie in their place."""
        with jsonl.opened(self.own / LEDGER) as file:
            jsonl.write(file, line)
            os.fsync(file.fileno())

    def _is_there(self, line: dict[str, Any]) -> bool:
        sizes = line.get("bytes", {})
        paths = {name: self.folder / SHARDS / name for name in sizes}
        return bool(sizes) and all(
            path.is_file() and path.stat().st_size == sizes[name] for name, path in paths.items()
        )


def facts_of(
    settings: Predicting, artifact: Artifact, pieces: tuple[Piece, ...], kept: dict[str, str]
) -> dict[str, Any]:
    """Return everything that decides the bytes of the answers.

    Of the machine, where a text's answer shall be the same bits: what it computes with.
    """
    backend, accelerator = artifact.manifest.compiled.backend, artifact.accelerator
    machine = {
        "name": accelerator.model(),
        "features": sorted(accelerator.features()),
        "versions": backend.versions(),
    }
    facts = portable_facts(settings, artifact, pieces, kept)
    return {**facts, "machine": machine if settings.predict.invariant else {}}


def portable_facts(
    settings: Predicting, artifact: Artifact, pieces: tuple[Piece, ...], kept: dict[str, str]
) -> dict[str, Any]:
    """Return what decides the bytes of the answers on any machine; no device is needed."""
    predict, output = config.dump(settings.predict), config.dump(settings.output)
    asked = {name: predict[name] for name in ("invariant", "rows")}
    return {
        "artifact": sha256(artifact.folder / MANIFEST),
        "source": config.dump(settings.source),
        "pieces": {piece.name: [piece.bytes, piece.stamp] for piece in pieces},
        "texts": list(settings.predict.texts),
        "prompt": settings.predict.prompt,
        "output": {name: output[name] for name in ("format", "dtype")},
        "kept": kept,
        **asked,
    }


def place_of(settings: Predicting, environment: Mapping[str, str]) -> Place:
    """Return which job this is, as the settings or the launcher of an array say.

    The names are those of sbatch's manual ("JOB ARRAY SUPPORT") and of Kubernetes' indexed Jobs.
    Raises SettingsError for an index that is none of so many.
    """
    index, count = settings.predict.index, settings.predict.count
    first = int(environment.get("SLURM_ARRAY_TASK_MIN", "0"))
    told = environment.get("SLURM_ARRAY_TASK_ID")
    if told is not None:
        step = int(environment.get("SLURM_ARRAY_TASK_STEP", "1"))
        index = (int(told) - first) // step if index == "auto" else index
        count = int(environment.get("SLURM_ARRAY_TASK_COUNT", "1")) if count == "auto" else count
    elif count != "auto" and index == "auto":
        index = int(environment.get("JOB_COMPLETION_INDEX", "0"))
    place = Place(0 if index == "auto" else index, 1 if count == "auto" else count)
    if place.index >= place.count:
        problem = f"predict.index = {place.index} is none of {place.count} jobs, 0 to the last"
        raise SettingsError(problem, "set predict.count to how many there are")
    return place


def write_result(job: Job) -> dict[str, Any] | None:
    """Write the sums over all shards and jobs once nothing is left; return them."""
    every = job.finished()
    ends = {shard.piece: shard.part + 1 for shard, line in every.items() if line["last"]}
    if len(ends) < len(job.pieces) or sum(ends.values()) > len(every):
        return None
    counted = sums(every)
    result = {"format": FORMAT, **counted, **_paid(job.folder, counted["rows"])}
    write_json(job.folder / RESULT, result)
    return result


def _paid(folder: Path, rows: int) -> dict[str, Any]:
    """Return what all jobs have cost; dollars are unknown where those of one are."""
    jobs = [path.parent for path in (folder / JOBS).glob(f"*/{ATTEMPTS}")]
    every = [_of_job(job) for job in jobs]
    known = [each.usd for each in every if each.usd is not None]
    usd = sum(known) if len(known) == len(every) else None
    return {
        "machine_seconds": round(sum(each.machine_seconds for each in every), 3),
        "usd": usd,
        "usd_per_million": None if usd is None or not rows else usd / rows * MILLION,
    }


def _of_job(own: Path) -> Reading:
    """Return what a job has paid; of one that was killed, up to when it was last seen."""
    last = jsonl.last(own / ATTEMPTS) or {}
    if "began" in last and "ended" not in last:
        return paid(own, time.time(), last_seen(own))[0]
    return reading(last)


def sums(found: Mapping[Shard, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums over shards: records, tokens, seconds of each part of the work."""
    counted = ("rows", "quarantined", "skipped", "truncated", "tokens", "slots")
    total: dict[str, Any] = {name: sum(line[name] for line in found.values()) for name in counted}
    total["shards"] = len(found)
    total["useful_token_share"] = total["tokens"] / total["slots"] if total["slots"] else None
    total["rows_per_second"] = {
        part: _rate(total["rows"], sum(line["seconds"][part] for line in found.values()))
        for part in ("read", "compute", "write")
    }
    return total


def _rate(rows: int, seconds: float) -> float | None:
    return rows / seconds if seconds > 0 else None


def paths(folder: Path, lines_of: Mapping[Shard, Mapping[str, Any]]) -> Iterator[Path]:
    """Yield the files of answers in the order of the records."""
    for shard in sorted(lines_of):
        for name in lines_of[shard]["bytes"]:
            yield folder / SHARDS / name


def _stored(folder: Path) -> dict[str, Any] | None:
    """Return what a folder has answers of; None for an empty one, DataError for another."""
    path = folder / JOB
    if path.is_file():
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path} cannot be read: {error}", OTHER) from None
        return found
    foreign = (
        [each for each in folder.iterdir() if each.name not in {SHARDS, QUARANTINE, JOBS}]
        if (folder.is_dir())
        else []
    )
    if folder.is_file() or foreign:
        raise DataError(f"{folder} holds something else", OTHER)
    return None
