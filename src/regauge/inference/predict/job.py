"""A job's output folder: the facts that decide the content, and finished shards.

    job.json                      the facts that decide the output; a job with others is refused
    shards/000012-00003.parquet   the output for part 3 of piece 12, in record order
    quarantine/000012-00003.jsonl that shard's rejected records, each with a reason
    jobs/0-of-1/ledger.jsonl      a line for each finished shard: rows, hash, tokens, seconds
    jobs/0-of-1/attempts.jsonl    the cost of each command
    result.json                   the totals, after the last shard is finished

A shard is finished when its line is in the ledger. The files are written to a temporary folder,
flushed and renamed before that: a killed job loses only the shards in progress. Several jobs may
share an output folder; each has separate pieces and a separate ledger.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import config
from regauge.config import FORMAT
from regauge.config.output_files import ATTEMPTS, JOB, JOBS, LEDGER, RESULT
from regauge.inference.predict.shard_queue import ShardId, ShardQueue
from regauge.run_folders.cost_meter import (
    Cost,
    parse_cost,
    read_last_seen,
    read_paid,
    read_time,
)
from regauge.run_folders.documents import PaidLine, ShardLine
from regauge.supervision.nodes.aws_batch_variables import read_array_index, read_array_size
from regauge.system import jsonl
from regauge.system.errors import DataError, SettingsError
from regauge.system.files import sha256, write_json
from regauge.system.log import logger
from regauge.system.units import MILLION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from regauge.data.sources import Piece
    from regauge.data.values import FieldKind
    from regauge.inference.export.artifact import Artifact
    from regauge.inference.predict.settings import PredictSettings

SHARDS, QUARANTINE = "shards", "quarantine"
SHARD_SUFFIXES = ("parquet", "jsonl", "csv", "npy")
MAX_NAMES = 5
"""Maximum shards named in a message."""
OTHER_FOLDER_REMEDY = "name another output.folder, or delete that one"


@dataclass(frozen=True)
class JobSlot:
    """A job's position among equal jobs with the same output folder."""

    index: int = 0
    count: int = 1

    def owns(self, piece: int) -> bool:
        """Return whether this job processes a piece."""
        return piece % self.count == self.index


@dataclass(frozen=True)
class PredictJob:
    """A job: settings, source pieces, and slot."""

    settings: PredictSettings
    pieces: tuple[Piece, ...]
    slot: JobSlot

    @property
    def folder(self) -> Path:
        """Output folder, shared by all jobs."""
        return Path(self.settings.output.folder)

    @property
    def job_folder(self) -> Path:
        """Subfolder written only by this job."""
        return self.folder / JOBS / f"{self.slot.index}-of-{self.slot.count}"

    @property
    def piece_numbers(self) -> tuple[int, ...]:
        """Numbers of this job's pieces."""
        return tuple(filter(self.slot.owns, range(len(self.pieces))))

    def check_folder(self, facts: dict[str, Any]) -> None:
        """Raise DataError if the folder has output from a job with other facts, or other files.

        Writes nothing.
        """
        document = json.loads(json.dumps(facts))
        if (stored := _read_job_file(self.folder)) is not None:
            self._compare(document, {name: stored.get(name) for name in document})

    def claim_folder(self, facts: dict[str, Any]) -> None:
        """Create the output folder for a job with these facts.

        Raises DataError if it has output from a job with other facts, or other files.
        """
        document = json.loads(json.dumps({"format": FORMAT, **facts}))
        if (stored := _read_job_file(self.folder)) is None:
            for name in (SHARDS, QUARANTINE):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            self.write_shared(JOB, document)
            stored = _read_job_file(self.folder)
        self._compare(document, stored)

    def _compare(self, document: dict[str, Any], stored: dict[str, Any] | None) -> None:
        if stored != document:
            difference = _describe_difference(document, stored or {})
            problem = f"{self.folder} has the output of another job: {difference}"
            raise DataError(problem, OTHER_FOLDER_REMEDY)

    def write_shared(self, name: str, document: dict[str, Any]) -> None:
        """Write a document shared by all jobs, unless an equal job has just written it."""
        temporary = self.job_folder / name
        self.job_folder.mkdir(parents=True, exist_ok=True)
        write_json(temporary, document)
        with suppress(FileExistsError):
            os.link(temporary, self.folder / name)
        temporary.unlink()

    def read_finished_shards(self) -> dict[ShardId, dict[str, Any]]:
        """Return the ledger lines of all jobs' finished shards."""
        return read_finished_shards(self.folder)

    def find_finished_shards(self) -> dict[ShardId, dict[str, Any]]:
        """Return all finished shards' ledger lines; hash their files if settings ask so."""
        needs_hashes = self.settings.predict.verify_shards
        return self.verify_finished_shards() if needs_hashes else self.read_finished_shards()

    def verify_finished_shards(self) -> dict[ShardId, dict[str, Any]]:
        """Return the finished shards' ledger lines, and log changed shards.

        Hashes the files of this job's pieces. A shard with a changed file is not finished.
        """
        lines = [line for line in _read_ledgers(self.folder) if _has_files(self.folder, line)]
        if lines:
            logger.info("Verifying finished shards: %d", len(lines))
        with ThreadPoolExecutor() as pool:
            are_whole = list(pool.map(self._has_hashes, lines))
        pairs = zip(lines, are_whole, strict=True)
        whole = {_get_shard(line): line for line, is_whole in pairs if is_whole}
        damaged = {_get_shard(line) for line in lines} - whole.keys()
        if damaged:
            names = ", ".join(shard.name for shard in sorted(damaged)[:MAX_NAMES])
            logger.warning("%d changed, computing again: %s", len(damaged), names)
        return whole

    def build_queue(self, finished: Mapping[ShardId, Mapping[str, Any]]) -> ShardQueue:
        """Return the queue of unfinished shards."""
        is_last = {shard: line["is_last"] for shard, line in finished.items()}
        return ShardQueue(self.piece_numbers, is_last)

    def commit_shard(self, line: Mapping[str, Any]) -> None:
        """Append a shard's line to the ledger; the files must be in the output folder."""
        with jsonl.open_for_append(self.job_folder / LEDGER) as file:
            jsonl.write_line(file, line)
            os.fsync(file.fileno())

    def _has_hashes(self, line: dict[str, Any]) -> bool:
        """Return whether a ledger line's files have their hashes, if this job wrote them."""
        if not self.slot.owns(line["piece"]):
            return True
        hashes = {self.folder / SHARDS / name: line["sha256"].get(name) for name in line["bytes"]}
        if line.get("quarantine_sha256"):
            name = f"{_get_shard(line).name}.jsonl"
            hashes[self.folder / QUARANTINE / name] = line["quarantine_sha256"].get(name)
        return all(path.is_file() and sha256(path) == value for path, value in hashes.items())


def read_finished_shards(folder: Path) -> dict[ShardId, dict[str, Any]]:
    """Return the ledger lines of all finished shards in an output folder.

    A shard with a missing or truncated file is not finished.
    """
    return {_get_shard(line): line for line in _read_ledgers(folder) if _has_files(folder, line)}


def _read_ledgers(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted((folder / JOBS).glob(f"*/{LEDGER}")):
        yield from jsonl.read_lines(path, ShardLine)


def _has_files(folder: Path, line: dict[str, Any]) -> bool:
    """Return whether a ledger line's files are its shard's and have their sizes."""
    sizes = line["bytes"]
    names = {f"{_get_shard(line).name}.{suffix}" for suffix in SHARD_SUFFIXES}
    paths = {name: folder / SHARDS / name for name in sizes}
    return bool(sizes) and all(
        name in names and path.is_file() and path.stat().st_size == sizes[name]
        for name, path in paths.items()
    )


def _describe_difference(document: dict[str, Any], stored: dict[str, Any]) -> str:
    """Describe the first difference between two jobs; source pieces stand for their files."""
    before, after = stored.get("pieces", {}), document.get("pieces", {})
    if before.keys() != after.keys():
        name = min(before.keys() ^ after.keys())
        return f"'{name}' is only in {'the stored' if name in before else 'this'} source"
    if before != after:
        name = min(name for name in before if before[name] != after[name])
        return f"'{name}' of the source has changed"
    return config.describe_first_difference("", document, stored)


def _get_shard(line: Mapping[str, Any]) -> ShardId:
    return ShardId(line["piece"], line["part"])


def collect_facts(
    settings: PredictSettings,
    artifact: Artifact,
    pieces: dict[str, list[Any]],
    kept_fields: dict[str, FieldKind],
) -> dict[str, Any]:
    """Return all facts that decide the output bytes.

    `pieces` has each piece's size and identity by name. With `predict.batch_invariant` the facts
    include the chip and the backend versions.
    """
    backend, accelerator = artifact.manifest.compiled.backend, artifact.accelerator
    machine = {
        "name": accelerator.model_name(),
        "features": sorted(accelerator.features()),
        "versions": backend.versions(),
    }
    facts = collect_portable_facts(settings, artifact, pieces, kept_fields)
    return {**facts, "machine": machine if settings.predict.batch_invariant else {}}


def collect_portable_facts(
    settings: PredictSettings,
    artifact: Artifact,
    pieces: dict[str, list[Any]],
    kept_fields: dict[str, FieldKind],
) -> dict[str, Any]:
    """Return the facts that decide the output on any machine; needs no accelerator."""
    predict, output = config.dump(settings.predict), config.dump(settings.output)
    options = {name: predict[name] for name in ("batch_invariant", "shard_records")}
    return {
        "artifact_sha256": artifact.content_sha256,
        "source": config.dump(settings.source),
        "pieces": pieces,
        "text_fields": list(settings.predict.text_fields),
        "prompt_name": settings.predict.prompt_name,
        "output": {name: output[name] for name in ("format", "dtype")},
        "keep_fields": kept_fields,
        "generation": config.dump(settings.generation),
        **options,
    }


def resolve_slot(settings: PredictSettings, environment: Mapping[str, str]) -> JobSlot:
    """Return this job's slot: the only one, unless the settings share the records.

    The index and the count may come from a launcher's variables, documented in sbatch's manual
    ("JOB ARRAY SUPPORT"), for AWS Batch arrays and for Kubernetes' indexed Jobs. Raises
    SettingsError if one of them is unknown, or the index is not below the count.
    """
    index, count = settings.predict.job_index, settings.predict.job_count
    if count == "auto":
        count = _read_count(environment)
    if index == "auto":
        index = 0 if count == 1 else _read_index(environment)
    slot = JobSlot(index, count)
    if slot.index >= slot.count:
        problem = f"predict.job_index = {slot.index} is not below the number of jobs, {slot.count}"
        raise SettingsError(problem, "set predict.job_count to the number of jobs")
    return slot


def _read_count(environment: Mapping[str, str]) -> int:
    if (size := read_array_size(environment)) is not None:
        return size
    if (count := environment.get("SLURM_ARRAY_TASK_COUNT")) is None:
        problem = 'predict.job_count = "auto" needs the variables of a Slurm array or of AWS Batch'
        raise SettingsError(problem, "set predict.job_count to the number of jobs")
    return int(count)


def _read_index(environment: Mapping[str, str]) -> int:
    if (index := read_array_index(environment)) is not None:
        return index
    if (task := environment.get("SLURM_ARRAY_TASK_ID")) is not None:
        min_task = int(environment.get("SLURM_ARRAY_TASK_MIN", "0"))
        return (int(task) - min_task) // int(environment.get("SLURM_ARRAY_TASK_STEP", "1"))
    if (task := environment.get("JOB_COMPLETION_INDEX")) is not None:
        return int(task)
    problem = "no launcher sets the index of this job"
    raise SettingsError(problem, "set predict.job_index, from 0 to predict.job_count - 1")


def write_result(job: PredictJob) -> dict[str, Any] | None:
    """Write all jobs' totals to `result.json` and return them; None if shards are left."""
    lines = job.read_finished_shards()
    num_parts = {shard.piece: shard.part + 1 for shard, line in lines.items() if line["is_last"]}
    if len(num_parts) < len(job.pieces) or sum(num_parts.values()) > len(lines):
        return None
    totals = sum_shards(lines)
    result = {"format": FORMAT, **totals, **_sum_costs(job.folder, totals["rows"])}
    write_json(job.folder / RESULT, result)
    return result


def _sum_costs(folder: Path, rows: int) -> dict[str, Any]:
    """Return all jobs' cost; dollars are None if one job's cost is unknown."""
    job_folders = [path.parent for path in (folder / JOBS).glob(f"*/{ATTEMPTS}")]
    costs = [_read_cost(job_folder) for job_folder in job_folders]
    dollars = [cost.usd for cost in costs if cost.usd is not None]
    usd = sum(dollars) if len(dollars) == len(costs) else None
    return summarize_cost(sum(cost.machine_seconds for cost in costs), usd, rows)


def summarize_cost(machine_seconds: float, usd: float | None, rows: int) -> dict[str, Any]:
    """Return machine-seconds, dollars, and dollars per million records; None if unknown."""
    return {
        "machine_seconds": round(machine_seconds, 3),
        "usd": usd,
        "usd_per_million_rows": None if usd is None or not rows else usd / rows * MILLION,
    }


def find_summary(job: PredictJob) -> dict[str, Any] | None:
    """Return all jobs' totals and this one's cost; None if work is left."""
    last_attempt = jsonl.read_last_line(job.job_folder / ATTEMPTS, PaidLine) or {}
    if not (job.folder / RESULT).is_file() or last_attempt.get("ended_at") is None:
        return None
    lines = job.find_finished_shards()
    local = {shard: line for shard, line in lines.items() if job.slot.owns(shard.piece)}
    if job.build_queue(lines).num_unfinished:
        return None
    cost, rows = parse_cost(last_attempt), sum(line["rows"] for line in local.values())
    return {**sum_shards(lines), **summarize_cost(cost.machine_seconds, cost.usd, rows)}


def _read_cost(job_folder: Path) -> Cost:
    """Return a job's cost; a killed command is paid until it was last seen."""
    last = jsonl.read_last_line(job_folder / ATTEMPTS, PaidLine) or {}
    if last.get("started_at") is not None and last.get("ended_at") is None:
        return read_paid(job_folder, read_time(), read_last_seen(job_folder))[0]
    return parse_cost(last)


def sum_shards(lines: Mapping[ShardId, Mapping[str, Any]]) -> dict[str, Any]:
    """Return shard totals: records, tokens, and rows per second in each phase."""
    counts = ("rows", "quarantined", "skipped", "truncated", "tokens", "computed_tokens")
    totals: dict[str, Any] = {name: sum(line[name] for line in lines.values()) for name in counts}
    for name in ("dropped_fields", "missing_fields"):
        totals[name] = dict(
            sum((Counter(line.get(name, {})) for line in lines.values()), Counter())
        )
    totals["shards"] = len(lines)
    num_computed = totals["computed_tokens"]
    totals["useful_token_fraction"] = totals["tokens"] / num_computed if num_computed else None
    totals["rows_per_second"] = {
        phase: _divide(totals["rows"], sum(line["seconds"][phase] for line in lines.values()))
        for phase in ("read", "compute", "write")
    }
    return totals


def _divide(rows: int, seconds: float) -> float | None:
    return rows / seconds if seconds > 0 else None


def list_output_paths(folder: Path, lines: Mapping[ShardId, Mapping[str, Any]]) -> Iterator[Path]:
    """Yield the files of finished shards in record order."""
    for shard in sorted(lines):
        for name in lines[shard]["bytes"]:
            yield folder / SHARDS / name


def _read_job_file(folder: Path) -> dict[str, Any] | None:
    """Return `job.json`; None for a new folder; raises DataError if it has other files."""
    document = config.find_document(folder / JOB, OTHER_FOLDER_REMEDY)
    if document is not None:
        return document
    subfolders = {SHARDS, QUARANTINE, JOBS}
    is_foreign = folder.is_file() or (
        folder.is_dir() and any(entry.name not in subfolders for entry in folder.iterdir())
    )
    if is_foreign:
        raise DataError(f"{folder} is not an output folder of predict", OTHER_FOLDER_REMEDY)
    return None
