"""NVIDIA GPU counters from NVML, the driver library; does not import torch.

NVML counts millijoules since the driver was loaded.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from regauge.system.device_counters import DeviceCounters, read_or_none

if TYPE_CHECKING:
    from collections.abc import Callable


def start_meter(uuid: str) -> Callable[[], float] | None:
    """Return a function that returns the joules used by a GPU since this call.

    All processes count. None if nvidia-ml-py or the counter is missing (before Volta).
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        before = pynvml.nvmlDeviceGetTotalEnergyConsumption(device)
    except pynvml.NVMLError:
        return None
    return lambda: (pynvml.nvmlDeviceGetTotalEnergyConsumption(device) - before) / 1e3


def open_counters() -> Callable[[], tuple[DeviceCounters, ...]]:
    """Return a function that reads the counters of all local GPUs, by NVML index.

    It returns an empty tuple if nvidia-ml-py is missing or the driver does not answer.
    """
    try:
        import pynvml
    except ImportError:
        return tuple
    try:
        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
    except pynvml.NVMLError:
        return tuple
    return lambda: tuple(
        _read_counters(pynvml, str(index), handle) for index, handle in enumerate(handles)
    )


def _read_counters(pynvml: Any, device: str, handle: Any) -> DeviceCounters:
    query = partial(read_or_none, error=pynvml.NVMLError)

    def memory(field: str) -> float | None:
        return query(lambda: getattr(pynvml.nvmlDeviceGetMemoryInfo(handle), field))

    return DeviceCounters(
        device=device,
        utilization=query(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
        memory_used_bytes=memory("used"),
        memory_total_bytes=memory("total"),
        power_watts=query(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
        temperature_celsius=query(
            lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        ),
    )
