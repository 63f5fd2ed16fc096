"""Reads batch inference snapshots, from the jobs' ledgers."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from regauge.commands._top.snapshot import Snapshot, TableRow, ViewEvent, ViewProgress
from regauge.config.output_files import ATTEMPTS, JOB, LEDGER
from regauge.config.run_names import name_run
from regauge.run_folders.cost_meter import read_last_seen
from regauge.run_folders.documents import JobShape, PaidLine, ShardLine, read_document
from regauge.run_folders.piece_bytes import PieceBytes
from regauge.run_folders.run_tail import RunTail, list_job_folders, price_line, read_run_tail
from regauge.system import jsonl
from regauge.system.errors import DataError
from regauge.system.units import MILLION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from regauge.commands._top.snapshot import Value

RESUME = "run the command again to resume"
REASONS = {
    "unknown": "no end was recorded, or a job is left",
    "stopped": "a signal has stopped the command; `kill -CONT` continues it",
    "preempted": f"stopped by a signal; {RESUME}",
    "failed": f"see the log of the command; {RESUME}",
}
"""State -> reason shown with it."""
ENDS = {"failed": "the command failed", "preempted": "a signal stopped the command"}
"""Recorded command outcome -> end event."""
SUMMED = ("rows", "quarantined", "truncated", "tokens", "computed_tokens")
"""Ledger keys summed over the shards."""


class PredictReader:
    """Reads a `predict` output folder; each ledger line is read once."""

    poll_seconds = 0.5

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[Path, jsonl.Tail] = {}
        self._shards: dict[Path, dict[tuple[int, int], dict[str, Any]]] = defaultdict(dict)
        """Job folder -> (piece, part) -> ledger line."""

    def read(self) -> Snapshot:
        """Return the present state; raises DataError if the folder has vanished."""
        if not self._folder.is_dir():
            raise DataError("the folder does not exist any more", "name another run")
        now = time.time()
        tail = read_run_tail(self._folder)
        self._read_ledgers()
        shards = [line for job in self._shards.values() for line in job.values()]
        totals, seconds, state = _sum(shards), _sum_seconds(tail, now), tail.find_state(now)
        progress = self._measure_progress(shards, seconds if state == "running" else 0.0)
        usd = tail.compute_usd(now)
        return Snapshot(
            name=name_run(self._folder),
            verb="predict",
            state=state,
            read_at=now,
            table="jobs",
            rows=tuple(_build_row(*job, now) for job in self._shards.items()),
            groups={"records": _list_records(totals, seconds), "cost": _list_costs(usd, totals)},
            reason=REASONS.get(state, ""),
            facts=(tail.lock_owner,) if tail.lock_owner else (),
            progress=progress,
            events=tuple(_list_events(tail)),
        )

    def _read_ledgers(self) -> None:
        for job in list_job_folders(self._folder):
            if (job / LEDGER).exists():
                tail = self._tails.setdefault(job, jsonl.Tail(job / LEDGER, ShardLine))
                self._shards[job] |= {(line["piece"], line["part"]): line for line in tail.read()}

    def _measure_progress(self, shards: list[dict[str, Any]], seconds: float) -> ViewProgress:
        """Return the pieces that are done, with the time left by the bytes of all shards.

        `seconds` is the time so far, 0 if the job does not run.
        """
        pieces = read_document(self._folder / JOB, JobShape).get("pieces", {}).values()
        sizes = [int(entry[0] or 0) if entry else 0 for entry in pieces]
        done = {line["piece"] for line in shards if line["is_last"]}
        read = PieceBytes(sizes)
        for line in shards:
            read.add(line)
        bytes_done = read.total
        is_known = seconds > 0 and bytes_done > 0
        eta = seconds * (sum(sizes) - bytes_done) / bytes_done if is_known else None
        return ViewProgress("pieces", len(done), len(sizes) or None, eta)


def _sum(shards: Iterable[dict[str, Any]]) -> Counter[str]:
    """Return the sums over ledger lines; `shards` is their number."""
    totals: Counter[str] = Counter()
    for line in shards:
        totals.update(shards=1, **{name: line[name] for name in SUMMED})
    return totals


def _sum_seconds(tail: RunTail, now: float) -> float:
    """Return the longest time any job has run, over all its commands, in seconds."""
    totals = [0.0]
    for line in tail.launches:
        seconds = line.get("machine_seconds", 0.0) / line.get("nodes", 1)
        if line.get("ended_at") is None and line.get("started_at") is not None:
            until = now if tail.is_locked else min(now, tail.last_seen_at or now)
            seconds += max(0.0, until - line["started_at"])
        totals.append(seconds)
    return max(totals)


def _build_row(job: Path, shards: dict[tuple[int, int], dict[str, Any]], now: float) -> TableRow:
    totals = _sum(shards.values())
    lines = jsonl.read_recent_lines(job / ATTEMPTS, PaidLine)
    return TableRow(
        {
            "job": job.name,
            "shards": totals["shards"],
            "records": totals["rows"],
            "failed_records": totals["quarantined"],
            "usd": price_line(lines[-1], now, read_last_seen(job)) if lines else None,
        },
        is_problem=totals["quarantined"] > 0,
    )


def _list_records(totals: Counter[str], seconds: float) -> dict[str, Value]:
    computed, is_known = totals["computed_tokens"], bool(seconds and totals["rows"])
    return {
        "records": totals["rows"],
        "records_per_second": totals["rows"] / seconds if is_known else None,
        "tokens_per_second": totals["tokens"] / seconds if is_known else None,
        "padding_ratio": 1 - totals["tokens"] / computed if computed else None,
        "failed_records": totals["quarantined"],
        "truncated_records": totals["truncated"],
        "shards": totals["shards"],
    }


def _list_costs(usd: float | None, totals: Counter[str]) -> dict[str, Value]:
    is_known = usd is not None and totals["rows"] > 0
    per_million = (usd or 0.0) / totals["rows"] * MILLION if is_known else None
    return {"usd": usd, "usd_per_million_records": per_million}


def _list_events(tail: RunTail) -> Iterator[ViewEvent]:
    for line in tail.launches:
        if line.get("started_at") is not None:
            yield ViewEvent(line["started_at"], "the command started")
        if line.get("ended_at") is not None:
            text = ENDS.get(line.get("outcome") or "", "the command ended")
            yield ViewEvent(line["ended_at"], text)
