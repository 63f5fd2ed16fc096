"""How far a phase of `prepare` is: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from rich import progress

from regauge import log
from regauge.units import MEGA

if TYPE_CHECKING:
    from types import TracebackType


class Phase:
    """A phase whose work is counted in bytes; it says its rate, and when it will be done."""

    def __init__(self, name: str, total_bytes: int, done_bytes: int = 0) -> None:
        self._name = name
        self._total = total_bytes
        self._before = self._done = done_bytes
        self._start = self._said = time.monotonic()
        self._bar: progress.Progress | None = None
        self._task = progress.TaskID(0)

    def __enter__(self) -> Self:
        if log.interactive():
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
            log.logger.info(f"{self._name}: {size}in {seconds:.1f} s{self._rate(seconds)}")

    def advance(self, count: int) -> None:
        """Count bytes of work as done."""
        self._done += count
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=self._done)
        elif now - self._said >= log.SECONDS_BETWEEN_LINES:
            self._said = now
            log.logger.info(self._line(now - self._start))

    def _line(self, seconds: float) -> str:
        done = f"{self._done / MEGA:.0f} of {self._total / MEGA:.0f} MB"
        fresh = self._done - self._before
        left = (self._total - self._done) * seconds / max(fresh, 1)
        return f"{self._name}: {done}{self._rate(seconds)}, {left:.0f} s left"

    def _rate(self, seconds: float) -> str:
        fresh = self._done - self._before
        return f", {fresh / MEGA / seconds:.1f} MB/s" if fresh and seconds > 0 else ""
