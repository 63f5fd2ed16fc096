"""Joules that a GPU says it has taken, by NVML: millijoules since its driver was loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def meter(uuid: str) -> Callable[[], float] | None:
    """Return what counts the joules of a GPU from now on, whoever else uses it.

    None without NVIDIA's Python package (nvidia-ml-py), and for GPUs before Volta: they count none.
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
