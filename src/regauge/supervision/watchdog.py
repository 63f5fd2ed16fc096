"""Which process of a run is silent for too long, seen from outside of all of them.

A limit is learned: ten times the longest that a phase has lasted between two signs, and no less
than a floor; the processes measure that themselves, since a short phase is over between two looks.
Until a phase has been, the longest wait of the run's settings holds. A process that waits for
another is as silent as one that hangs: while any of them gives signs, none does.
"""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.supervision.channel import text
from regauge.supervision.heartbeat import PHASES

if TYPE_CHECKING:
    from regauge.supervision.channel import WorkerReports
    from regauge.supervision.heartbeat import Beat, HeartbeatTable

PATIENCE = 10.0
"""A phase may last so many times the longest that was seen."""
FIRST = ("start", "init", "preflight", "compile")
"""Phases that come once: nothing is learned of them."""
PREFLIGHT, PREFLIGHT_SECONDS = "preflight", 30.0
"""A check takes less than a second; a device that has not answered until then never does."""
STACK_SECONDS = 1.0


@dataclass(frozen=True)
class Watchdog:
    """The signs of an attempt's processes, and how long they may be silent."""

    pulses: HeartbeatTable
    floor_seconds: float
    ceiling_seconds: float

    def overdue(self, elsewhere: float = math.inf) -> str | None:
        """Return what is wrong when a process has given no sign for too long, or None.

        `elsewhere` is for how long the processes of other nodes gave none, in seconds.
        """
        now = time.monotonic()
        quiet, late = elsewhere, []
        signs = [self.pulses.read(rank) for rank in range(self.pulses.size)]
        for sign in signs:
            longest = max(other.longest[PHASES.index(sign.phase)] for other in signs)
            silent, limit = now - sign.at, self._limit(sign.phase, longest)
            quiet = min(quiet, silent)
            if sign.phase != "end" and silent > limit:
                late.append(f"no sign for {silent:.1f} s in '{sign.phase}' (limit {limit:.1f} s)")
        return late[0] if late and quiet > min(self.floor_seconds, PREFLIGHT_SECONDS) else None

    def _limit(self, phase: str, longest: float) -> float:
        """Return how long a process may be silent in a phase; `longest` is 0 before it has been."""
        if phase == PREFLIGHT:
            return min(PREFLIGHT_SECONDS, self.ceiling_seconds)
        if longest == 0.0 or phase in FIRST:
            return max(self.floor_seconds, self.ceiling_seconds)
        return max(self.floor_seconds, min(PATIENCE * longest, self.ceiling_seconds))


@dataclass(frozen=True)
class Witness:
    """One process as it was found when the run hung."""

    rank: int
    sign: Beat
    state: str
    """The kernel's letter: T is stopped, R runs, S sleeps, D waits for a device."""
    stack: list[str]
    """Its threads' frames; empty where it did not answer."""
    collectives: list[dict[str, Any]]
    """Its last collectives, oldest first; empty where it did not answer, or has none."""

    @property
    def sequence(self) -> int:
        """The number of its last collective."""
        return max((int(each["collective_seq_id"]) for each in self.collectives), default=0)

    @property
    def standing(self) -> list[float]:
        """How far it came; the others wait for the one that came least far.

        That one is stopped, or answers nothing, or has come to fewer collectives than they, or is
        silent for longest.
        """
        silent = time.monotonic() - self.sign.at
        return [self.state not in ("T", "t"), bool(self.stack), self.sequence, -silent]


def witnesses(pulses: HeartbeatTable, pids: list[int], answers: WorkerReports) -> list[Witness]:
    """Ask every process for its stacks, and return what each was found in."""
    signs = [pulses.read(rank) for rank in range(pulses.size)]
    answers.ask()
    states = [_state(pid) for pid in pids]
    for pid, state in zip(pids, states, strict=True):
        if state not in ("T", "t", "Z", ""):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(STACK_SECONDS)
    return [
        Witness(rank, sign, state, answers.stack(rank), answers.collectives(rank))
        for rank, (sign, state) in enumerate(zip(signs, states, strict=True))
    ]


def culprit(found: list[Witness]) -> Witness:
    """Return the process that the others wait for."""
    return min(found, key=lambda one: one.standing)


def _state(pid: int) -> str:
    fields = text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[0] if fields else ""
