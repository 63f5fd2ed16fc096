"""Projects the end of a round from the durations of earlier rounds, and warns before it is late."""

from __future__ import annotations

import statistics
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from regauge.registry.pipelines.elapsed_time import RoundClock, compute_elapsed, read_moment
from regauge.registry.pipelines.rounds import Round, list_durations
from regauge.run_folders.formatting import duration
from regauge.system.log import logger
from regauge.system.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CHECK_SECONDS = 30.0
"""Pause between two checks while a stage runs."""
DeadlineState = Literal["late", "missed"]


@dataclass(frozen=True)
class DeadlineEvent:
    """A round that is projected to be late, or that is late."""

    state: DeadlineState
    round_number: int
    stage: str
    elapsed_seconds: float
    projected_seconds: float
    """Projected seconds from the start of the round to its end."""
    deadline_seconds: float

    def describe(self) -> str:
        """Return the event as one line."""
        limit = duration(self.deadline_seconds)
        if self.state == "missed":
            elapsed = duration(self.elapsed_seconds)
            return (
                f"round {self.round_number} missed its deadline of {limit}: {elapsed} have passed "
                f"in stage '{self.stage}'"
            )
        return (
            f"round {self.round_number} is projected to take {duration(self.projected_seconds)}, "
            f"more than its deadline of {limit}, in stage '{self.stage}'"
        )


@dataclass
class DeadlineTracker:
    """Compares the elapsed and the projected time of a round with its deadline."""

    deadline_hours: float
    current: Round
    stages: Sequence[str]
    """Names of the stages that have to run, in order."""
    rounds: Sequence[Round]
    """Earlier rounds."""
    clock: RoundClock
    notify: Callable[[DeadlineEvent], object]
    """Called once for each state of the round."""
    _reported: set[DeadlineState] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def project_seconds(self, stage: str, stage_seconds: float = 0.0) -> float:
        """Return the projected seconds of the whole round, when a stage runs for some seconds.

        Each stage takes the median of its durations in the last rounds. A stage that never ran
        takes no time, so the first round is reported only when it is late.
        """
        remaining = 0.0
        for name in self.stages[self.stages.index(stage) :]:
            durations = list_durations(self.rounds, name)
            expected = statistics.median(durations) if durations else 0.0
            remaining += max(0.0, expected - stage_seconds) if name == stage else expected
        return self._compute_elapsed() + remaining

    def check(self, stage: str, stage_seconds: float = 0.0) -> None:
        """Report the round if it is late, or projected to be late; each state once."""
        with self._lock:
            elapsed = self._compute_elapsed()
            projected = self.project_seconds(stage, stage_seconds)
            limit = self.deadline_hours * SECONDS_PER_HOUR
            state: DeadlineState = "missed" if elapsed > limit else "late"
            if projected <= limit or state in self._reported:
                return
            self._reported.add(state)
            number = self.current.number
            event = DeadlineEvent(state, number, stage, elapsed, projected, limit)
        logger.warning("%s", event.describe())
        self.notify(event)

    @contextmanager
    def watch(self, stage: str, check_seconds: float = CHECK_SECONDS) -> Iterator[None]:
        """Check the deadline before a stage, and repeatedly while it runs in the block."""
        start = self.clock.read_uptime()
        self.check(stage)
        is_finished = threading.Event()

        def check_repeatedly() -> None:
            while not is_finished.wait(check_seconds):
                self.check(stage, self.clock.read_uptime() - start)

        thread = threading.Thread(target=check_repeatedly, name="deadline", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_finished.set()
            thread.join()

    def _compute_elapsed(self) -> float:
        return compute_elapsed(self.current.began, read_moment(self.clock))
