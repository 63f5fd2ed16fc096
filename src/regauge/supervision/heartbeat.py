"""Heartbeats: each process's current phase and step, in shared memory.

All processes on a node map one file, with one record per process. A beat does not cost a system
call. The supervisor can read it while the writer's interpreter is blocked or the process is
stopped. A record is copied as a whole, because `pack_into` would fill it with zeros first. No torch
here.
"""

from __future__ import annotations

import mmap
import struct
import time
from typing import TYPE_CHECKING, Protocol

from regauge.run_folders.node_status import Beat

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
RECORD = struct.Struct(f"<QQQd{len(PHASES)}ddQ")
"""Count, step, phase, time, longest gaps, time of the last step, device memory."""
STRIDE_BYTES = 128
"""Distance between records: two cache lines."""


class Heartbeat:
    """Writes one process's heartbeats; without a file they are discarded."""

    def __init__(self, path: Path | None = None, rank: int = 0) -> None:
        self.size = 1
        self._map: mmap.mmap | None = None
        self._offset = rank * STRIDE_BYTES
        self._count = self._step = self._phase = 0
        self._at = time.monotonic()
        self._max_gaps = [0.0] * len(PHASES)
        self._step_at, self._device_memory_bytes = 0.0, 0
        if path is not None:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)

    def beat(self, phase: str | None = None, step: int | None = None) -> None:
        """Write a heartbeat; phase and step keep their values unless given."""
        now = time.monotonic()
        self._max_gaps[self._phase] = max(self._max_gaps[self._phase], now - self._at)
        self._at = now
        if phase is not None:
            self._phase = PHASES.index(phase)
        if step is not None:
            self._step_at = now if step != self._step else self._step_at
            self._step = step
        self._count += 1
        if self._map is not None:
            self._map[self._offset : self._offset + RECORD.size] = RECORD.pack(
                self._count,
                self._step,
                self._phase,
                now,
                *self._max_gaps,
                self._step_at,
                self._device_memory_bytes,
            )

    def record_memory(self, device_memory_bytes: int) -> None:
        """Store the device memory peak for the next heartbeat."""
        self._device_memory_bytes = device_memory_bytes

    def read(self, rank: int = 0) -> Beat:
        """Return this process's last beat; a `HeartbeatReader` of one process."""
        del rank
        return Beat(
            self._count,
            self._step,
            PHASES[self._phase],
            self._at,
            tuple(self._max_gaps),
            self._step_at,
            self._device_memory_bytes,
        )


class HeartbeatReader(Protocol):
    """Reads the heartbeats of a node's processes, by their index there."""

    size: int

    def read(self, rank: int) -> Beat: ...


class HeartbeatTable:
    """Reads the heartbeats of all processes on a node."""

    def __init__(self, path: Path, size: int) -> None:
        now = time.monotonic()
        path.write_bytes(bytes(size * STRIDE_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        for rank in range(size):
            gaps = [0.0] * len(PHASES)
            RECORD.pack_into(self._map, rank * STRIDE_BYTES, 0, 0, 0, now, *gaps, 0.0, 0)
        self.size = size

    def read(self, rank: int) -> Beat:
        """Return a process's last beat; read again if it changes meanwhile."""
        record = slice(rank * STRIDE_BYTES, rank * STRIDE_BYTES + RECORD.size)
        first = self._map[record]
        while (second := self._map[record]) != first:
            first = second
        count, step, phase, at, *max_gaps, step_at, memory = RECORD.unpack(second)
        name = PHASES[phase % len(PHASES)]
        return Beat(count, step, name, at, tuple(max_gaps), step_at, memory)

    def total_beats(self) -> int:
        """Return how many beats all processes have written so far."""
        return sum(self.read(rank).count for rank in range(self.size))

    def close(self) -> None:
        self._map.close()
