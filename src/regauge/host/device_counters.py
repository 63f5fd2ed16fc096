"""What a vendor's library and a driver report about the devices of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class DeviceCounters:
    """The vendor's counters of one device; None for a counter that the device does not have."""

    device: str
    """Index of the device on its machine, in the order of the vendor's tools."""
    utilization: float | None = None
    """Share of time in which it computes, from 0 to 1."""
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None


DeviceReader = Callable[[], tuple[DeviceCounters, ...]]
"""Reads the counters of all devices of this machine."""


@dataclass(frozen=True)
class DeviceErrors:
    """The errors of one device that its driver has logged."""

    device: str
    """Index of the device, as in `DeviceCounters`."""
    count: int = 0
    last_code: int = 0
    """The vendor's code of the last error, such as an XID of NVIDIA; 0 without one."""


class DeviceErrorLog(Protocol):
    """Reads what the drivers of all devices of this machine log as errors, and never waits."""

    def read(self) -> tuple[DeviceErrors, ...]:
        """Return the errors of each device since the log was opened."""

    def close(self) -> None:
        """Free the log."""
