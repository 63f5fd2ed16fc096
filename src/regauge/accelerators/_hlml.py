"""The counters of Gaudi devices, from HLML, the library of Intel's driver; no torch here."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.accelerators import DeviceCounters

if TYPE_CHECKING:
    from collections.abc import Callable

LIBRARY = Path("/usr/lib/habanalabs/libhlml.so")
"""The file that Intel's Python package (habana-pyhlml) loads."""


def open_counters() -> Callable[[], tuple[DeviceCounters, ...]]:
    """Return a function that reads the counters of all Gaudi devices of this machine.

    It returns none if habana-pyhlml or the library is missing, or if the driver does not answer.
    """
    if not LIBRARY.exists():  # the package would print a line
        return tuple
    try:
        with warnings.catch_warnings():
            # The package imports a module of its own that is deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            import pyhlml
    except ImportError:
        return tuple
    try:
        pyhlml.hlmlInit()
        handles = [
            pyhlml.hlmlDeviceGetHandleByIndex(index) for index in range(pyhlml.hlmlDeviceGetCount())
        ]
    except pyhlml.HLMLError:
        return tuple
    return lambda: tuple(
        _read_counters(pyhlml, str(index), handle) for index, handle in enumerate(handles)
    )


def _read_counters(pyhlml: Any, device: str, handle: Any) -> DeviceCounters:
    """Return the counters of a device; None for each one that the library does not return."""
    from pyhlml.pyhlml_types_generated import HLML_TEMPERATURE_SENSORS

    sensor = HLML_TEMPERATURE_SENSORS.HLML_TEMPERATURE_ON_AIP

    def query(read: Callable[[], float]) -> float | None:
        try:
            return float(read())
        except pyhlml.HLMLError:
            return None

    return DeviceCounters(
        device=device,
        utilization=query(lambda: pyhlml.hlmlDeviceGetUtilizationRates(handle).aip / 100),
        memory_used_bytes=query(lambda: pyhlml.hlmlDeviceGetMemoryInfo(handle).used),
        memory_total_bytes=query(lambda: pyhlml.hlmlDeviceGetMemoryInfo(handle).total),
        power_watts=query(lambda: pyhlml.hlmlDeviceGetPowerUsage(handle) / 1e3),
        temperature_celsius=query(lambda: pyhlml.hlmlDeviceGetTemperature(handle, sensor)),
    )
