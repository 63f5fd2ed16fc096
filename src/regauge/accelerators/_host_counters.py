"""The counters of the host's processors and memory, from the files of the Linux kernel."""

from __future__ import annotations

import time
from pathlib import Path

from regauge.accelerators import _powercap
from regauge.system.host.device_counters import DeviceCounters

STAT, MEMORY = Path("/proc/stat"), Path("/proc/meminfo")
IDLE_FIELDS = (3, 4)
"""Positions of the idle time and of the time that waits for disks (proc(5))."""
MIN_SECONDS = 0.05
"""Shortest interval of a rate; the counters of the kernel have steps of 0.01 s."""


class HostCounters:
    """Reads the counters; rates count from the read before."""

    def __init__(self) -> None:
        self._times = _read_times()
        self._joules = _powercap.start_meter()
        self._energy = (time.monotonic(), 0.0)

    def read(self) -> tuple[DeviceCounters, ...]:
        """Return the counters of the machine as one device; none if the kernel has no files."""
        total = read_kibibytes(MEMORY, "MemTotal")
        free = read_kibibytes(MEMORY, "MemAvailable")
        if total is None or free is None:
            return ()
        return (
            DeviceCounters(
                device="host",
                utilization=self._read_utilization(),
                memory_used_bytes=(total - free) * 1024,
                memory_total_bytes=total * 1024,
                power_watts=self._read_power(),
            ),
        )

    def _read_utilization(self) -> float | None:
        """Return the busy share of the time since the last call."""
        before, after = self._times, _read_times()
        if before is None or after is None or after[1] <= before[1]:
            return None
        self._times = after
        return (after[0] - before[0]) / (after[1] - before[1])

    def _read_power(self) -> float | None:
        if self._joules is None:
            return None
        now, joules = time.monotonic(), self._joules()
        seconds, used = now - self._energy[0], joules - self._energy[1]
        if seconds < MIN_SECONDS or used < 0:
            return None
        self._energy = (now, joules)
        return used / seconds


def _read_times() -> tuple[float, float] | None:
    """Return the busy time and the whole time of all cores, in ticks of the kernel."""
    try:
        fields = [float(value) for value in STAT.read_text(encoding="utf-8").split()[1:9]]
    except (OSError, ValueError):
        return None
    idle = sum(fields[index] for index in IDLE_FIELDS)
    return sum(fields) - idle, sum(fields)


def read_kibibytes(path: Path, name: str) -> int | None:
    """Return the value of a line in a file of the kernel, which is in KiB."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
