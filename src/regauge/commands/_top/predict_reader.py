"""Reads the snapshot of a job of batch inference, from its ledgers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.commands._top.snapshot import (
    Column,
    Figure,
    FigureGroup,
    Snapshot,
    TableRow,
    ViewEvent,
    ViewProgress,
    ViewTable,
)
from regauge.run_folders.cost_meter import ATTEMPTS, PaidLine, read_last_seen
from regauge.run_folders.run_tail import JOB, JOBS, RunTail, price_line, read_run_tail
from regauge.system import jsonl
from regauge.system.errors import DataError
from regauge.system.json_files import DocumentShape, find_json, find_mismatch
from regauge.system.units import MILLION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.commands._top.snapshot import Value

LEDGER = "ledger.jsonl"
RESUME = "run the command again to resume"
REASONS = {
    "unknown": "no end was recorded, or a job is left",
    "preempted": f"stopped by a signal; {RESUME}",
    "failed": f"see the log of the command; {RESUME}",
}
"""The reason that is shown with a state."""
ENDS = {"failed": "the command failed", "preempted": "a signal stopped the command"}
"""Event of the end of a command, by its recorded outcome."""
COLUMNS = (
    Column("job", "JOB", "text"),
    Column("shards", "SHARDS", "number"),
    Column("records", "RECORDS", "number"),
    Column("failed_records", "FAILED", "number"),
    Column("usd", "COST", "dollars"),
)


class FinishedShard(DocumentShape):
    """A line of the ledger of a job, as far as its progress needs it."""

    piece: jsonl.Count
    part: jsonl.Count
    is_last: bool
    rows: jsonl.Count
    quarantined: jsonl.Count
    truncated: jsonl.Count
    tokens: jsonl.Count
    computed_tokens: jsonl.Count


class JobShape(DocumentShape):
    """The document of all jobs: the bytes and the stamp of each piece."""

    pieces: dict[str, list[Any]]


class Totals(NamedTuple):
    """The sums over finished shards."""

    shards: int = 0
    records: int = 0
    failed_records: int = 0
    truncated_records: int = 0
    tokens: int = 0
    computed_tokens: int = 0


class PredictReader:
    """Reads the output folder of `predict`; each line of a ledger is read once."""

    poll_seconds = 0.5

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[str, jsonl.Tail] = {}
        self._shards: dict[str, dict[tuple[int, int], FinishedShard]] = {}

    def read(self) -> Snapshot:
        """Return the present state; raises DataError if the folder has vanished."""
        if not self._folder.is_dir():
            raise DataError("the folder does not exist any more", "name another run")
        now = time.time()
        tail = read_run_tail(self._folder)
        self._read_ledgers()
        totals = _sum(self._list_shards())
        state = tail.find_state(now)
        seconds = _sum_seconds(tail, now)
        sizes = self._read_sizes()
        return Snapshot(
            name=self._folder.resolve().name,
            verb="predict",
            state=state,
            read_at=now,
            reason=REASONS.get(state, ""),
            facts=(tail.lock_owner,) if tail.lock_owner else (),
            progress=self._measure_progress(sizes, seconds, is_running=state == "running"),
            groups=(
                FigureGroup("Records", _list_records(totals, seconds)),
                FigureGroup("Cost", _list_costs(tail, totals, now)),
            ),
            table=ViewTable("Jobs", COLUMNS, tuple(self._list_rows(now))),
            events=tuple(_list_events(tail)),
        )

    def _read_ledgers(self) -> None:
        for path in sorted((self._folder / JOBS).glob(f"*/{LEDGER}")):
            job = path.parent.name
            lines = self._tails.setdefault(job, jsonl.Tail(path)).read()
            shards = self._shards.setdefault(job, {})
            for line in lines:
                if not find_mismatch(line, FinishedShard):
                    shard = FinishedShard.model_validate(line)
                    shards[shard.piece, shard.part] = shard

    def _list_shards(self) -> list[FinishedShard]:
        return [shard for shards in self._shards.values() for shard in shards.values()]

    def _read_sizes(self) -> list[int]:
        """Return the bytes of the pieces by their number; empty if they are unknown."""
        try:
            document = find_json(self._folder / JOB, "remove it")
        except (DataError, OSError):
            return []
        if document is None or find_mismatch(document, JobShape):
            return []
        return [int(entry[0] or 0) if entry else 0 for entry in document["pieces"].values()]

    def _measure_progress(
        self, sizes: list[int], seconds: float, *, is_running: bool
    ) -> ViewProgress:
        """Return the pieces that are done, with the time left by their bytes."""
        done = {shard.piece for shard in self._list_shards() if shard.is_last}
        bytes_done = sum(sizes[piece] for piece in done if piece < len(sizes))
        is_known = is_running and bytes_done > 0
        eta = seconds * (sum(sizes) - bytes_done) / bytes_done if is_known else None
        return ViewProgress("pieces", len(done), len(sizes) or None, eta)

    def _list_rows(self, now: float) -> Iterator[TableRow]:
        for job, shards in self._shards.items():
            totals = _sum(list(shards.values()))
            home = self._folder / JOBS / job
            lines = jsonl.read_recent_lines(home / ATTEMPTS, PaidLine)
            usd = price_line(lines[-1], now, read_last_seen(home)) if lines else None
            values: dict[str, Value] = {
                "job": job,
                "shards": totals.shards,
                "records": totals.records,
                "failed_records": totals.failed_records,
                "usd": usd,
            }
            yield TableRow(values, is_problem=totals.failed_records > 0)


def _sum(shards: list[FinishedShard]) -> Totals:
    return Totals(
        len(shards),
        sum(shard.rows for shard in shards),
        sum(shard.quarantined for shard in shards),
        sum(shard.truncated for shard in shards),
        sum(shard.tokens for shard in shards),
        sum(shard.computed_tokens for shard in shards),
    )


def _sum_seconds(tail: RunTail, now: float) -> float:
    """Return the longest time that a job has run, over all of its commands, in seconds."""
    totals = [0.0]
    for line in tail.launches:
        seconds = line.get("machine_seconds", 0.0) / line.get("nodes", 1)
        if line.get("ended_at") is None and line.get("started_at") is not None:
            until = now if tail.is_locked else min(now, tail.last_seen_at or now)
            seconds += max(0.0, until - line["started_at"])
        totals.append(seconds)
    return max(totals)


def _list_records(totals: Totals, seconds: float) -> tuple[Figure, ...]:
    padding = 1 - totals.tokens / totals.computed_tokens if totals.computed_tokens else None
    rate, tokens = (
        value / seconds if seconds and totals.records else None
        for value in (totals.records, totals.tokens)
    )
    return (
        Figure("records", "done", totals.records),
        Figure("records_per_second", "records/s", rate, "count"),
        Figure("tokens_per_second", "tokens/s", tokens, "count"),
        Figure("padding_ratio", "padding", padding, "percent"),
        Figure("failed_records", "failed", totals.failed_records),
        Figure("truncated_records", "truncated", totals.truncated_records),
        Figure("shards", "shards", totals.shards),
    )


def _list_costs(tail: RunTail, totals: Totals, now: float) -> tuple[Figure, ...]:
    usd = tail.compute_usd(now)
    per_million = usd / totals.records * MILLION if usd is not None and totals.records else None
    return (
        Figure("usd", "spent", usd, "dollars"),
        Figure("usd_per_million_records", "per 1M records", per_million, "dollars"),
    )


def _list_events(tail: RunTail) -> Iterator[ViewEvent]:
    for line in tail.launches:
        if line.get("started_at") is not None:
            yield ViewEvent(line["started_at"], "the command started")
        if line.get("ended_at") is not None:
            text = ENDS.get(line.get("outcome") or "", "the command ended")
            yield ViewEvent(line["ended_at"], text)
