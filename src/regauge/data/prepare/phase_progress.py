"""Progress in a `prepare` phase: a live bar on a terminal, else a log line at intervals."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from rich import progress

from regauge.system import log
from regauge.system.units import MEGA

if TYPE_CHECKING:
    from types import TracebackType


class PhaseProgress:
    """A phase with work counted in bytes; reports throughput and remaining time."""

    def __init__(self, name: str, total_bytes: int, done_bytes: int = 0) -> None:
        self._name = name
        self._total = total_bytes
        self._resumed_bytes = self._done = done_bytes
        self._start = self._last_line = time.monotonic()
        self._bar: progress.Progress | None = None
        self._task = progress.TaskID(0)

    def __enter__(self) -> Self:
        if log.is_interactive():
            self._bar = progress.Progress(
                progress.TextColumn("{task.description:10}"),
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
                console=log.stderr,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=self._total, completed=self._done)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()
        if kind is None:
            seconds = time.monotonic() - self._start
            size = f"{self._done / MEGA:.1f} MB " if self._done else ""
            log.logger.info(f"{self._name}: {size}in {seconds:.1f} s{self._format_rate(seconds)}")

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=self._done)
        elif now - self._last_line >= log.PROGRESS_INTERVAL_SECONDS:
            self._last_line = now
            log.logger.info(self._format_line(now - self._start))

    def _format_line(self, seconds: float) -> str:
        done = f"{self._done / MEGA:.0f} of {self._total / MEGA:.0f} MB"
        processed = self._done - self._resumed_bytes
        seconds_left = (self._total - self._done) * seconds / max(processed, 1)
        rate = self._format_rate(seconds)
        return f"{self._name}: {done}{rate}, {seconds_left:.0f} s left"

    def _format_rate(self, seconds: float) -> str:
        processed = self._done - self._resumed_bytes
        return f", {processed / MEGA / seconds:.1f} MB/s" if processed and seconds > 0 else ""
