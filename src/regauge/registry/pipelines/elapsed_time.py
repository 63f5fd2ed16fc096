"""The time since a round began, across several processes and jumps of the clock.

The clock of the kernel counts from the start of the machine and cannot be set. It is used as long
as the machine has not restarted. After a restart, the time of day is used, which may jump; a
negative difference counts as zero.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from regauge.system.errors import DataError
from regauge.system.files import read_content

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RoundClock(Protocol):
    """The clocks of a pipeline."""

    def read_date(self) -> float:
        """Return the time of day in seconds since 1970, in UTC; it may jump."""

    def read_uptime(self) -> float:
        """Return the seconds since the machine was started."""

    def read_boot(self) -> str:
        """Return an identifier that changes when the machine is restarted; empty if unknown."""


class SystemClock:
    """The clocks of this machine."""

    def read_date(self) -> float:
        """Return the time of day in seconds since 1970, in UTC."""
        return time.time()

    def read_uptime(self) -> float:
        """Return the seconds since the machine was started, suspended time included."""
        if hasattr(time, "CLOCK_BOOTTIME"):
            return time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.monotonic()

    def read_boot(self) -> str:
        """Return the boot identifier of the kernel; empty if there is none."""
        try:
            return (read_content(BOOT_ID, "check /proc") or b"").decode().strip()
        except (DataError, PermissionError):
            return ""


@dataclass(frozen=True)
class Moment:
    """A moment on all clocks."""

    date: float
    uptime: float
    boot: str


def read_moment(clock: RoundClock) -> Moment:
    """Return the present moment."""
    return Moment(clock.read_date(), clock.read_uptime(), clock.read_boot())


def compute_elapsed(start: Moment, now: Moment) -> float:
    """Return the seconds between two moments, at least 0."""
    if start.boot and start.boot == now.boot and now.uptime >= start.uptime:
        return now.uptime - start.uptime
    return max(0.0, now.date - start.date)
