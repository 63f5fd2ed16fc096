"""What a vendor's library and a driver report about the devices of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceCounters:
    """The vendor's counters for one device; None for a counter the device does not have."""

    device: str
    """Device index on this machine, in the order of the vendor's tools."""
    utilization: float | None = None
    """Share of time spent computing, from 0 to 1."""
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None


DeviceReader = Callable[[], tuple[DeviceCounters, ...]]
"""Reads the counters of all devices on this machine."""


def read_or_none(read: Callable[[], float], error: type[Exception]) -> float | None:
    """Return a counter, or None if the vendor's library raises `error`."""
    try:
        return float(read())
    except error:
        return None


@dataclass(frozen=True)
class DeviceErrors:
    """One device's errors: logged by the driver, or in device memory."""

    device: str
    """Device index, as in `DeviceCounters`."""
    count: int = 0
    last_code: int = 0
    """The vendor's code for the last error, such as an NVIDIA XID; 0 without one."""


ErrorReader = Callable[[], tuple[DeviceErrors, ...]]
"""Reads the errors of all devices on this machine since the reader was opened."""
