"""Gaudi device counters from HLML, Intel's driver library; does not import torch."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.system.device_counters import DeviceCounters, DeviceErrors, read_or_none

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.system.device_counters import ErrorReader

LIBRARY = Path("/usr/lib/habanalabs/libhlml.so")
"""Loaded by Intel's Python package habana-pyhlml."""


def open_counters() -> Callable[[], tuple[DeviceCounters, ...]]:
    """Return a function that reads the counters of all local Gaudi devices.

    It returns an empty tuple if habana-pyhlml or the library is missing, or if the driver does not
    answer.
    """
    pyhlml, handles = _open_devices()
    return lambda: tuple(
        _read_counters(pyhlml, str(index), handle) for index, handle in enumerate(handles)
    )


def open_errors() -> ErrorReader:
    """Return a function that reads uncorrected memory errors from now on."""
    return EccErrors(*_open_devices()).read


class EccErrors:
    """Counts each device's uncorrected memory errors (ECC) since construction."""

    def __init__(self, pyhlml: Any, handles: list[Any]) -> None:
        self._pyhlml, self._handles = pyhlml, handles
        self._first = [_count_errors(pyhlml, handle) for handle in handles]
        self._errors = [DeviceErrors(str(index)) for index in range(len(handles))]

    def read(self) -> tuple[DeviceErrors, ...]:
        """Return the errors so far; a device that does not answer keeps its last count.

        A device without a count at construction starts with its first one.
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
    """Return a device's lifetime count of uncorrected errors; None if it does not answer."""
    from pyhlml.pyhlml_types_generated import HLML_ECC_COUNTER_TYPE, HLML_MEMORY_ERROR_TYPE

    kind = HLML_MEMORY_ERROR_TYPE.HLML_MEMORY_ERROR_TYPE_UNCORRECTED
    period = HLML_ECC_COUNTER_TYPE.HLML_AGGREGATE_ECC
    total = read_or_none(
        lambda: pyhlml.hlmlDeviceGetTotalECCErrors(handle, kind, period), pyhlml.HLMLError
    )
    return None if total is None else int(total)


def _open_devices() -> tuple[Any, list[Any]]:
    """Return Intel's package and the device handles; no handles if one is missing."""
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
