"""The energy counter of NVIDIA GPUs: NVML counts millijoules since the driver was loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def start_meter(uuid: str) -> Callable[[], float] | None:
    """Return a function that returns the joules that a GPU used since this call.

    The energy of all processes counts. Returns None if NVIDIA's Python package (nvidia-ml-py) is
    not installed, or if the GPU has no counter (before Volta).
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
