"""How far a job is: a live bar on a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from rich import progress

from regauge import log
from regauge.units import MILLION

if TYPE_CHECKING:
    from regauge.prediction.job import Job
    from regauge.prediction.shard_queue import Shard
    from regauge.supervision.cost_meter import Meter


class Pace:
    """Counts what is heard of the workers."""

    def __init__(self, job: Job, done: dict[Shard, dict[str, Any]], meter: Meter) -> None:
        self._job = job
        self._counts: Counter[str] = Counter()
        for shard, line in done.items():
            if job.place.has(shard.piece):
                self._count(line)
        self._before = self._counts["rows"], self._counts["bytes"]
        self._meter = meter
        self._signed = 0
        """Records that are said to be answered, less those of the shards that were committed."""
        self._began = self._said = time.monotonic()
        self._ready = 0
        self._bar: progress.Progress | None = None
        self._task = progress.TaskID(0)

    def __enter__(self) -> Self:
        if log.interactive():
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.TextColumn("{task.fields[told]}"),
                progress.TimeRemainingColumn(),
                console=log.stderr,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("predict", total=self._total, told="starting")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()
        if self.begun:
            log.logger.info("%s", self._line(self._counts["rows"]))

    @property
    def begun(self) -> bool:
        """Whether a worker was ready."""
        return self._ready > 0

    @property
    def usd(self) -> float | None:
        """Dollars that this job has cost so far; None where the price is unknown."""
        return self._meter.read().usd

    def hear(self, event: dict[str, Any]) -> None:
        """Take what a worker said, and say how far all are when it is time."""
        if event["event"] == "shard":
            self._count(event)
            self._signed -= event["rows"]
        elif event["event"] == "sign":
            self._signed += event["rows"]
        elif event["event"] == "ready":
            self._ready += 1
            log.logger.info("worker %d is ready after %.1f s", event["worker"], event["seconds"])
        now = time.monotonic()
        if self._bar:
            self._bar.update(
                self._task, completed=self._counts["bytes"], told=self._line(self._rows)
            )
        elif now - self._said >= log.SECONDS_BETWEEN_LINES:
            self._said = now
            log.logger.info("%s, %s left", self._line(self._rows), self._left(now))

    def paid(self) -> dict[str, Any]:
        """Return what was paid so far, as it is written down."""
        return self._meter.read().document

    def cost(self) -> dict[str, Any]:
        """Return the seconds and dollars so far, and those of a million records."""
        found, rows = self._meter.read(), self._counts["rows"]
        each = None if found.usd is None or not rows else found.usd / rows * MILLION
        return {
            "machine_seconds": round(found.machine_seconds, 3),
            "usd": found.usd,
            "usd_per_million": each,
        }

    @property
    def _total(self) -> int:
        return sum(self._job.pieces[number].bytes for number in self._job.share)

    def _count(self, line: dict[str, Any]) -> None:
        for name in ("rows", "tokens", "slots"):
            self._counts[name] += line[name]
        if line["last"]:
            self._counts["bytes"] += self._job.pieces[line["piece"]].bytes

    def _left(self, now: float) -> str:
        """Return how long the rest takes by the bytes of the pieces that were finished so far."""
        fresh = self._counts["bytes"] - self._before[1]
        if not fresh:
            return "an unknown time"
        return f"{(now - self._began) * (self._total - self._counts['bytes']) / fresh:.0f} s"

    @property
    def _rows(self) -> int:
        return self._counts["rows"] + max(0, self._signed)

    def _line(self, rows: int) -> str:
        counts, usd = self._counts, self.usd
        rate = (rows - self._before[0]) / max(time.monotonic() - self._began, 1e-9)
        told = f"{rows:,} rows, {rate:,.0f} rows/s"
        if counts["slots"]:
            told += f", {counts['tokens'] / counts['slots']:.0%} useful tokens"
        return told if usd is None else f"{told}, {usd:.4f} USD"
