"""Projects a round's end from earlier durations, and warns before it is late."""

from __future__ import annotations

import statistics
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from regauge.registry.pipelines.rounds import ClockReading, Round, list_durations
from regauge.run_folders.formatting import duration
from regauge.system.log import logger
from regauge.system.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CHECK_SECONDS = 30.0
"""Seconds between two checks while a stage runs."""


@dataclass
class DeadlineTracker:
    """Compares a round's elapsed and projected time with the deadline."""

    deadline_hours: float
    current: Round
    stages: Sequence[str]
    """Remaining stage names, in order."""
    rounds: Sequence[Round]
    """Earlier rounds."""
    read_clocks: Callable[[], ClockReading]
    notify: Callable[[str], object]
    """Called with one line when the round is projected to be late, and when it is late."""
    _reported: set[bool] = field(default_factory=set)
    """Lateness of the round in each report so far."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def project_seconds(self, stage: str, stage_seconds: float = 0.0) -> float:
        """Return the projected seconds for the whole round when a stage has run for some seconds.

        Each stage takes its median duration in the last rounds. A stage that never ran takes no
        time, so the first round is reported only when it is late.
        """
        remaining = 0.0
        for name in self.stages[self.stages.index(stage) :]:
            durations = list_durations(self.rounds, name)
            expected = statistics.median(durations) if durations else 0.0
            remaining += max(0.0, expected - stage_seconds) if name == stage else expected
        return self._compute_elapsed() + remaining

    def check(self, stage: str, stage_seconds: float = 0.0) -> None:
        """Report the round if it is late or projected to be late; each state once."""
        with self._lock:
            elapsed = self._compute_elapsed()
            projected = self.project_seconds(stage, stage_seconds)
            limit = self.deadline_hours * SECONDS_PER_HOUR
            is_late = elapsed > limit
            if projected <= limit or is_late in self._reported:
                return
            self._reported.add(is_late)
        line = f"round {self.current.number} "
        if is_late:
            line += f"missed its deadline of {duration(limit)}: {duration(elapsed)} have passed"
        else:
            line += f"is projected to take {duration(projected)}, more than its deadline of "
            line += f"{duration(limit)},"
        line += f" in stage '{stage}'"
        logger.warning("%s", line)
        self.notify(line)

    @contextmanager
    def watch(self, stage: str, check_seconds: float = CHECK_SECONDS) -> Iterator[None]:
        """Check the deadline before a stage, and repeatedly while it runs in the block."""
        start = self.read_clocks()
        self.check(stage)
        is_finished = threading.Event()

        def check_repeatedly() -> None:
            while not is_finished.wait(check_seconds):
                self.check(stage, start.compute_elapsed(self.read_clocks()))

        thread = threading.Thread(target=check_repeatedly, name="deadline", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_finished.set()
            thread.join()

    def _compute_elapsed(self) -> float:
        return self.current.began.compute_elapsed(self.read_clocks())
