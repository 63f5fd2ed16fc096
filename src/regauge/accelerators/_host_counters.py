"""Host CPU, memory and energy counters from the Linux kernel.

Linux powercap has one energy counter per CPU package (Documentation/power/powercap in the kernel
source). It counts microjoules for the whole machine and wraps around at a maximum. Since 2020, most
kernels let only root read it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.system.device_counters import DeviceCounters

if TYPE_CHECKING:
    from collections.abc import Callable

POWERCAP = Path("/sys/class/powercap")
STAT, MEMORY = Path("/proc/stat"), Path("/proc/meminfo")
IDLE_FIELDS = (3, 4)
"""Positions of the idle and iowait times (proc(5))."""
MIN_SECONDS = 0.05
"""Shortest interval for a rate; kernel counters advance in steps of 0.01 s."""


class HostCounters:
    """Reads the counters; rates cover the time since the previous read."""

    def __init__(self) -> None:
        self._times = _read_times()
        self._joules = start_energy_meter()
        self._energy = (time.monotonic(), 0.0)

    def read(self) -> tuple[DeviceCounters, ...]:
        """Read host CPU and memory counters; empty if /proc is unavailable."""
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
    """Return the busy and total time over all cores, in kernel ticks."""
    try:
        fields = [float(value) for value in STAT.read_text(encoding="utf-8").split()[1:9]]
    except (OSError, ValueError):
        return None
    idle = sum(fields[index] for index in IDLE_FIELDS)
    return sum(fields) - idle, sum(fields)


def read_kibibytes(path: Path, name: str) -> int | None:
    """Return a value in KiB from a kernel file such as /proc/meminfo."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def start_energy_meter(root: Path = POWERCAP) -> Callable[[], float] | None:
    """Return a function that returns the joules since this call; None without counters.

    Handles one wrap-around per counter.
    """
    starts = [(file, _read_integer(file), maximum) for file, maximum in _find_energy_files(root)]
    if not starts:
        return None
    return lambda: (
        sum((_read_integer(file) - start) % (maximum + 1) for file, start, maximum in starts) / 1e6
    )


def _find_energy_files(root: Path) -> list[tuple[Path, int]]:
    """Return each CPU package's counter and its maximum; empty if any cannot be read."""
    counters = []
    for zone in sorted(root.glob("*")):
        file = zone / "energy_uj"
        try:
            if not (zone / "name").read_text(encoding="utf-8").startswith("package"):
                continue
            counters.append((file, _read_integer(zone / "max_energy_range_uj")))
            _read_integer(file)
        except (OSError, ValueError):
            if file.exists():
                return []
    return counters


def _read_integer(file: Path) -> int:
    return int(file.read_text(encoding="utf-8"))
