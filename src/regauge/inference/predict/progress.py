"""Reports a job's progress: a live bar on a terminal, otherwise a log line at intervals."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from rich import progress

from regauge.inference.predict.job import QUARANTINE, summarize_cost
from regauge.run_folders.cost_meter import parse_cost
from regauge.run_folders.piece_bytes import PieceBytes
from regauge.system import log
from regauge.system.errors import DataError
from regauge.system.log import logger
from regauge.system.wording import format_clause, format_count

if TYPE_CHECKING:
    from regauge.inference.predict.job import PredictJob
    from regauge.inference.predict.shard_queue import ShardId
    from regauge.run_folders.cost_meter import CostMeter


class ProgressBar:
    """Counts worker events and shows rows, throughput and cost."""

    def __init__(
        self, job: PredictJob, finished: dict[ShardId, dict[str, Any]], meter: CostMeter
    ) -> None:
        self._job = job
        self.counts: Counter[str] = Counter()
        """Sums over this job's finished shards; `shards` is their number."""
        self._read = PieceBytes([piece.bytes for piece in job.pieces])
        for shard, line in finished.items():
            if job.slot.owns(shard.piece):
                self._count_shard(line)
        self._rows_before, self._bytes_before = self.counts["rows"], self._read.total
        self._meter = meter
        self._uncommitted_rows = self._uncommitted_bytes = 0
        """Computed rows, and their source bytes, minus those in committed shards."""
        self._started = self._logged = time.monotonic()
        self._workers: set[int] = set()
        self.has_ready_worker = False
        """Whether a worker has loaded the artifact."""
        self._bar: progress.Progress | None = None
        self._task = progress.TaskID(0)

    def __enter__(self) -> Self:
        if log.is_interactive():
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.TextColumn("{task.fields[status]}"),
                progress.TimeRemainingColumn(),
                console=log.stderr,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("predict", total=self._total_bytes, status="starting")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()
        if self.has_ready_worker:
            logger.info("%s", self._format_counts(self.counts["rows"]))

    @property
    def num_workers(self) -> int:
        """How many workers are ready."""
        return len(self._workers)

    @property
    def usd(self) -> float | None:
        """This job's cost so far in dollars; None if the price is unknown."""
        return self._meter.read().usd

    def handle_event(self, event: dict[str, Any]) -> None:
        """Count an executor event; update the bar, or log a line when one is due."""
        if event["event"] == "shard":
            self._count_shard(event)
            self._uncommitted_rows -= event["rows"]
            self._uncommitted_bytes -= event["source_bytes"]
        elif event["event"] == "progress":
            self._uncommitted_rows += event["rows"]
            self._uncommitted_bytes += event["source_bytes"]
        elif event["event"] == "ready":
            self._workers.add(event["worker"])
            self.has_ready_worker = True
            logger.info("Worker %d ready after %.1f s.", event["worker"], event["seconds"])
        elif event["event"] == "lost":
            self._workers.discard(event["worker"])
        now = time.monotonic()
        if self._bar:
            self._bar.update(
                self._task,
                completed=self._num_bytes,
                status=self._format_counts(self._num_rows),
            )
        elif self._num_rows and now - self._logged >= log.PROGRESS_INTERVAL_SECONDS:
            self._logged = now
            counts, eta = self._format_counts(self._num_rows), self._format_eta(now)
            logger.info("%s, ETA %s", counts, eta)

    def cost_record(self) -> dict[str, Any]:
        """Return the cost so far, as stored in `attempts.jsonl`."""
        return self._meter.read().document

    def summarize_record(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return machine-seconds, dollars and dollars per million records for a cost record."""
        cost = parse_cost(record)
        return summarize_cost(cost.machine_seconds, cost.usd, self.counts["rows"])

    @property
    def _total_bytes(self) -> int:
        return sum(self._job.pieces[number].bytes for number in self._job.piece_numbers)

    def _count_shard(self, line: dict[str, Any]) -> None:
        self.counts["shards"] += 1
        for name in ("rows", "quarantined", "tokens", "computed_tokens"):
            self.counts[name] += line[name]
        self._read.add(line)

    def _format_eta(self, now: float) -> str:
        """Return the remaining time, extrapolated from the bytes of computed records."""
        bytes_done = self._num_bytes - self._bytes_before
        if bytes_done <= 0:
            return "unknown"
        bytes_left = max(self._total_bytes - self._num_bytes, 0)
        return f"{(now - self._started) * bytes_left / bytes_done:.0f} s"

    @property
    def _num_bytes(self) -> int:
        return self._read.total + max(0, self._uncommitted_bytes)

    @property
    def _num_rows(self) -> int:
        return self.counts["rows"] + max(0, self._uncommitted_rows)

    def _format_counts(self, rows: int) -> str:
        counts, usd = self.counts, self.usd
        rate = (rows - self._rows_before) / max(time.monotonic() - self._started, 1e-9)
        line = f"{rows:,} rows, {rate:,.0f} rows/s"
        if counts["computed_tokens"]:
            line += f", {counts['tokens'] / counts['computed_tokens']:.0%} useful tokens"
        return line if usd is None else f"{line}, {usd:.4f} USD"


def report_losses(job: PredictJob, summary: dict[str, Any]) -> dict[str, Any]:
    """Log what the output lacks, and return the other totals.

    Raises DataError if most records are rejected.
    """
    dropped, missing = summary.pop("dropped_fields"), summary.pop("missing_fields")
    if dropped:
        counts = ", ".join(
            f"{name} ({format_count(count, 'record')})" for name, count in dropped.items()
        )
        message = "Fields that the first records do not have are left out: %s; keep them with: %s"
        logger.warning(message, counts, "output.keep_fields")
    for name, count in missing.items():
        subject = format_clause(count, "record", "have")
        logger.warning("%s no '%s', so its value in the output is null", subject, name)
    if not (num_rejected := summary["quarantined"]):
        return summary
    folder, num_records = job.folder / QUARANTINE, num_rejected + summary["rows"]
    subject = format_clause(num_records, "record", "are")
    logger.warning("%s of %s rejected; see %s", f"{num_rejected:,}", subject, folder)
    if num_rejected > num_records / 2:
        problem = f"most records are rejected: {num_rejected} of {num_records}"
        raise DataError(problem, f"correct them, or the fields; see the reasons in {folder}")
    return summary
