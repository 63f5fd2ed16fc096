"""Metrics for each rank on this machine, from heartbeats in shared memory.

Three signals are separate. *Alive*: the process exists. *Progressing*: it is not stopped, and has
reported within half of the silence that ends the attempt. *Healthy*: it does not delay other ranks,
and its loss is finite. By default the limits are 30 s in steps, and 300 s in other phases.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.monitoring import vocabulary
from regauge.monitoring.samples import Sample
from regauge.supervision.heartbeat import PHASES
from regauge.system.processes import inspect_process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from regauge.run_folders.node_status import Beat
    from regauge.supervision.watchdog import Watchdog

STALL_SHARE = 0.5
"""Share of the silence limit after which a rank does not count as progressing."""
STOPPED_STATES = ("T", "t")
DEAD_STATES = ("", "Z", "X")
"""Process states in `/proc/<pid>/stat` (proc(5)); empty if the process does not exist."""


@dataclass(frozen=True)
class RankHealth:
    """What the ledger says about the ranks."""

    straggler: int | None = None
    """Rank delaying the others."""
    delay_seconds: float = 0.0
    """Delay per step."""
    is_loss_finite: bool = True


HEALTHY = RankHealth()


@dataclass(frozen=True)
class LocalRanks:
    """This machine's ranks in an attempt."""

    run: str
    watchdog: Watchdog
    pids: Sequence[int]
    first_rank: int

    def read_samples(self, health: RankHealth) -> Iterator[Sample]:
        heartbeats = self.watchdog.heartbeats
        beats = [heartbeats.read(number) for number in range(heartbeats.size)]
        for number, (pid, beat) in enumerate(zip(self.pids, beats, strict=True)):
            labels = (self.run, str(self.first_rank + number))
            limit = STALL_SHARE * self.watchdog.silence_limit(beat, beats)
            yield from _describe_process(labels, pid, beat, limit)
            yield from _describe_beat(labels, beat)
            is_late = health.straggler == self.first_rank + number
            delay = health.delay_seconds if is_late else 0.0
            yield Sample(vocabulary.RANK_DELAY, delay, labels)
            is_healthy = not is_late and health.is_loss_finite
            yield Sample(vocabulary.RANK_HEALTHY, is_healthy, labels)

    def read_end_samples(self) -> Iterator[Sample]:
        """Yield samples for every rank after the attempt has ended."""
        for number in range(len(self.pids)):
            labels = (self.run, str(self.first_rank + number))
            yield Sample(vocabulary.RANK_ALIVE, 0, labels)
            yield Sample(vocabulary.RANK_PROGRESSING, 0, labels)


def _describe_process(
    labels: tuple[str, ...], pid: int, beat: Beat, limit: float
) -> Iterator[Sample]:
    """Yield whether a process exists, is stopped and reports, and its memory."""
    process = inspect_process(pid)
    is_alive = process.state not in DEAD_STATES
    is_silent = beat.phase != "end" and time.monotonic() - beat.at > limit
    is_stopped = process.state in STOPPED_STATES
    is_progressing = is_alive and not is_stopped and not is_silent
    yield Sample(vocabulary.RANK_ALIVE, is_alive, labels)
    yield Sample(vocabulary.RANK_STOPPED, is_stopped, labels)
    yield Sample(vocabulary.RANK_PROGRESSING, is_progressing, labels)
    if process.state:
        yield Sample(vocabulary.RANK_MEMORY, process.resident_bytes, labels)


def _describe_beat(labels: tuple[str, ...], beat: Beat) -> Iterator[Sample]:
    """Yield step, phase and times from a heartbeat."""
    clock_offset = time.time() - time.monotonic()
    yield Sample(vocabulary.RANK_STEP, beat.step, labels)
    yield Sample(vocabulary.RANK_BEAT_TIMESTAMP, beat.at + clock_offset, labels)
    if beat.step_at:
        yield Sample(vocabulary.RANK_STEP_TIMESTAMP, beat.step_at + clock_offset, labels)
    if beat.device_memory_bytes:
        yield Sample(vocabulary.RANK_DEVICE_MEMORY, beat.device_memory_bytes, labels)
    for phase in PHASES:
        yield Sample(vocabulary.RANK_PHASE, phase == beat.phase, (*labels, phase))
