"""The counters of Gaudi devices, from HLML, the library of Intel's driver; no torch here."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.system.host.device_counters import DeviceCounters, DeviceErrors, read_or_none

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.system.host.device_counters import ErrorReader

LIBRARY = Path("/usr/lib/habanalabs/libhlml.so")
"""The file that Intel's Python package (habana-pyhlml) loads."""


def open_counters() -> Callable[[], tuple[DeviceCounters, ...]]:
    """Return a function that reads the counters of all Gaudi devices of this machine.

    It returns none if habana-pyhlml or the library is missing, or if the driver does not answer.
    """
    pyhlml, handles = _open_devices()
    return lambda: tuple(
        _read_counters(pyhlml, str(index), handle) for index, handle in enumerate(handles)
    )


def open_errors() -> ErrorReader:
    """Return a function that reads the uncorrected memory errors of all devices from now on."""
    return EccErrors(*_open_devices()).read


class EccErrors:
    """Counts the uncorrected memory errors (ECC) of each device after this object was created."""

    def __init__(self, pyhlml: Any, handles: list[Any]) -> None:
        self._pyhlml, self._handles = pyhlml, handles
        self._first = [_count_errors(pyhlml, handle) for handle in handles]
        self._errors = [DeviceErrors(str(index)) for index in range(len(handles))]

    def read(self) -> tuple[DeviceErrors, ...]:
        """Return the errors of each device so far. A device that does not answer keeps its number.

        A device without a number at the start gets its first number as its start.
        """
        for index, handle in enumerate(self._handles):
            total = _count_errors(self._pyhlml, handle)
            if total is None:
                continue
            first = self._first[index]
            self._first[index] = total if first is None else first
            count = total - (self._first[index] or 0)
            self._errors[index] = replace(self._errors[index], count=count)
        return tuple(self._errors)


def _count_errors(pyhlml: Any, handle: Any) -> int | None:
    """Return the uncorrected errors of a device in its life, or None if it does not answer."""
    from pyhlml.pyhlml_types_generated import HLML_ECC_COUNTER_TYPE, HLML_MEMORY_ERROR_TYPE

    kind = HLML_MEMORY_ERROR_TYPE.HLML_MEMORY_ERROR_TYPE_UNCORRECTED
    period = HLML_ECC_COUNTER_TYPE.HLML_AGGREGATE_ECC
    total = read_or_none(
        lambda: pyhlml.hlmlDeviceGetTotalECCErrors(handle, kind, period), pyhlml.HLMLError
    )
    return None if total is None else int(total)


def _open_devices() -> tuple[Any, list[Any]]:
    """Return Intel's package, and a handle of each device; no handle if one is missing."""
    if not LIBRARY.exists():  # the package would print a line
        return None, []
    try:
        with warnings.catch_warnings():
            # The package imports a module of its own that is deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            import pyhlml
    except ImportError:
        return None, []
    try:
        pyhlml.hlmlInit()
        indices = range(pyhlml.hlmlDeviceGetCount())
        return pyhlml, [pyhlml.hlmlDeviceGetHandleByIndex(index) for index in indices]
    except pyhlml.HLMLError:
        return pyhlml, []


def _read_counters(pyhlml: Any, device: str, handle: Any) -> DeviceCounters:
    """Return the counters of a device; None for each one that the library does not return."""
    from pyhlml.pyhlml_types_generated import HLML_TEMPERATURE_SENSORS

    sensor = HLML_TEMPERATURE_SENSORS.HLML_TEMPERATURE_ON_AIP
    query = partial(read_or_none, error=pyhlml.HLMLError)
    return DeviceCounters(
        device=device,
        utilization=query(lambda: pyhlml.hlmlDeviceGetUtilizationRates(handle).aip / 100),
        memory_used_bytes=query(lambda: pyhlml.hlmlDeviceGetMemoryInfo(handle).used),
        memory_total_bytes=query(lambda: pyhlml.hlmlDeviceGetMemoryInfo(handle).total),
        power_watts=query(lambda: pyhlml.hlmlDeviceGetPowerUsage(handle) / 1e3),
        temperature_celsius=query(lambda: pyhlml.hlmlDeviceGetTemperature(handle, sensor)),
    )
