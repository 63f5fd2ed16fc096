"""Hang detection: finds silent processes from outside, and the process that the others wait for.

The limit for a phase is learned: ten times the longest gap between two heartbeats in that phase,
but at least `floor_seconds`. The processes measure the gaps themselves, because a short phase is
over between two polls. Until a phase has occurred, the limit is `execution.timeout_seconds`. A
process that waits for another one is silent as well, so an attempt hangs only if no process beats.
"""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.supervision.heartbeat import PHASES
from regauge.system.processes import inspect_process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.run_folders.node_status import Beat
    from regauge.supervision.channel import WorkerReports
    from regauge.supervision.heartbeat import HeartbeatReader

MAX_GAP_FACTOR = 10.0
"""Silence may last this many times the phase's longest gap so far."""
UNLEARNED_PHASES = ("start", "init", "preflight", "compile")
"""Phases that occur once per attempt: their limits are not learned."""
PREFLIGHT, PREFLIGHT_SECONDS = "preflight", 30.0
"""Limit for the check phase: a check takes less than a second on a healthy device."""
STACK_SECONDS = 1.0
"""Time for the processes to write their stacks."""


@dataclass(frozen=True)
class Watchdog:
    """The heartbeats of an attempt's processes, and the limits on their silence."""

    heartbeats: HeartbeatReader
    floor_seconds: float
    """Minimum limit: `supervision.hang_timeout_seconds`."""
    ceiling_seconds: float
    """Limit for a phase not seen before: `execution.timeout_seconds`."""

    def find_hang(
        self, remote_silence: float = math.inf, resumed_at: float = -math.inf
    ) -> str | None:
        """Return why the attempt hangs, or None.

        `remote_silence` is the time since the last beat from a process on another node, in seconds.
        Silence before `resumed_at`, on time.monotonic(), does not count.
        """
        now = time.monotonic()
        min_silence, problems = remote_silence, []
        beats = [self.heartbeats.read(rank) for rank in range(self.heartbeats.size)]
        for beat in beats:
            silence, limit = now - max(beat.at, resumed_at), self.silence_limit(beat, beats)
            min_silence = min(min_silence, silence)
            if beat.phase != "end" and silence > limit:
                problems.append(
                    f"no heartbeat for {silence:.1f} s in phase '{beat.phase}' "
                    f"(limit {limit:.1f} s)"
                )
        is_silent = min_silence > min(self.floor_seconds, PREFLIGHT_SECONDS)
        return problems[0] if problems and is_silent else None

    def silence_limit(self, beat: Beat, beats: Sequence[Beat]) -> float:
        """Return how long a process may be silent in its phase, in seconds, given all beats."""
        max_gap = max(other.max_gaps[PHASES.index(beat.phase)] for other in beats)
        return self._limit(beat.phase, max_gap)

    def _limit(self, phase: str, max_gap: float) -> float:
        """Return the maximum silence in a phase, in seconds; `max_gap` is 0 the first time."""
        if phase == PREFLIGHT:
            return min(PREFLIGHT_SECONDS, self.ceiling_seconds)
        if max_gap == 0.0 or phase in UNLEARNED_PHASES:
            return max(self.floor_seconds, self.ceiling_seconds)
        return max(self.floor_seconds, min(MAX_GAP_FACTOR * max_gap, self.ceiling_seconds))


@dataclass(frozen=True)
class ProcessSnapshot:
    """A process's state when the attempt hung."""

    rank: int
    """Process index on its node."""
    beat: Beat
    state: str
    """Kernel state letter: T is stopped, R running, S sleeping, D waiting for a device."""
    stack: list[str]
    """Frames of all threads; empty if the process did not answer."""
    collectives: list[dict[str, Any]]
    """The last collectives, oldest first; empty if the process did not answer or ran none."""

    @property
    def sequence(self) -> int:
        """Sequence number of the last collective."""
        return max((int(entry["collective_seq_id"]) for entry in self.collectives), default=0)

    @property
    def progress_key(self) -> list[float]:
        """Sort key for progress; the others wait for the process with the smallest key.

        Such a process is stopped, or does not answer, or is behind in its collectives, or has been
        silent for the longest time.
        """
        silence = time.monotonic() - self.beat.at
        return [self.state not in ("T", "t"), bool(self.stack), self.sequence, -silence]


def take_snapshots(
    heartbeats: HeartbeatReader, pids: list[int], reports: WorkerReports
) -> list[ProcessSnapshot]:
    """Request stacks and collectives from all processes; return snapshots by rank."""
    beats = [heartbeats.read(rank) for rank in range(heartbeats.size)]
    reports.request_collectives()
    states = [inspect_process(pid).state for pid in pids]
    for pid, state in zip(pids, states, strict=True):
        if state not in ("T", "t", "Z", ""):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(STACK_SECONDS)
    return [
        ProcessSnapshot(rank, beat, state, reports.read_stack(rank), reports.read_collectives(rank))
        for rank, (beat, state) in enumerate(zip(beats, states, strict=True))
    ]


def blamed_rank(snapshots: list[ProcessSnapshot]) -> int:
    """Return the index of the process the others wait for."""
    return min(snapshots, key=lambda snapshot: snapshot.progress_key).rank
