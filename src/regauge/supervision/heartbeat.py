"""Signs of life: what each process of a run does now, in memory that its supervisor reads.

One record for each process in a file that all of them map. A sign costs no system call, and can be
read while its writer's interpreter is blocked or the process is stopped. It is copied there as a
whole: `pack_into` would fill it with zeros first. No torch here.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PHASES = (
    "start",
    "init",
    "preflight",
    "compile",
    "data_wait",
    "step",
    "evaluate",
    "checkpoint",
    "lost",
    "end",
)
RECORD = struct.Struct(f"<QQQd{len(PHASES)}d")
STRIDE = 128
"""Bytes from one record to the next: two lines of the processor's cache."""


@dataclass(frozen=True)
class Beat:
    """What a process last said."""

    count: int
    """Signs so far."""
    step: int
    """Steps that are done."""
    phase: str
    """Account of the ledger that its time goes to."""
    at: float
    """When, by the machine's monotonic clock."""
    longest: tuple[float, ...]
    """Most seconds from a sign in each phase to the next one; 0 for a phase that never was."""


class Heartbeat:
    """The signs of one process; without a file they go nowhere."""

    def __init__(self, path: Path | None = None, rank: int = 0) -> None:
        self._map: mmap.mmap | None = None
        self._offset = rank * STRIDE
        self._count = self._step = self._phase = 0
        self._at = time.monotonic()
        self._longest = [0.0] * len(PHASES)
        if path is not None:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)

    def beat(self, phase: str | None = None, step: int | None = None) -> None:
        """Give a sign; what is left out is as it was."""
        now = time.monotonic()
        self._longest[self._phase] = max(self._longest[self._phase], now - self._at)
        self._at = now
        if phase is not None:
            self._phase = PHASES.index(phase)
        if step is not None:
            self._step = step
        self._count += 1
        if self._map is not None:
            record = RECORD.pack(self._count, self._step, self._phase, now, *self._longest)
            self._map[self._offset : self._offset + RECORD.size] = record


class HeartbeatTable:
    """The signs of all processes, as their supervisor sees them."""

    def __init__(self, path: Path, size: int) -> None:
        now = time.monotonic()
        path.write_bytes(bytes(size * STRIDE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        for rank in range(size):
            RECORD.pack_into(self._map, rank * STRIDE, 0, 0, 0, now, *[0.0] * len(PHASES))
        self.size = size

    def read(self, rank: int) -> Beat:
        """Return the last sign of a process; one that is being written is read again."""
        place = slice(rank * STRIDE, rank * STRIDE + RECORD.size)
        first = self._map[place]
        while (second := self._map[place]) != first:
            first = second
        count, step, phase, at, *longest = RECORD.unpack(second)
        return Beat(count, step, PHASES[phase % len(PHASES)], at, tuple(longest))

    def total_beats(self) -> int:
        """Return how many signs all processes gave so far."""
        return sum(self.read(rank).count for rank in range(self.size))

    def close(self) -> None:
        """Let the file go."""
        self._map.close()
