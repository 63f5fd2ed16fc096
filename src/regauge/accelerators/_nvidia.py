"""NVIDIA GPU counters from NVML, and errors (XIDs) from the kernel log; does not import torch.

NVML, the driver library, counts millijoules since the driver was loaded. The driver of a GPU that
fell off the bus may not answer, but it has logged the error. Message format: NVIDIA's "XID Errors"
guide, "NVRM: Xid (PCI:0000:3b:00): 79, …".
"""

from __future__ import annotations

import errno
import os
import re
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.system.device_counters import DeviceCounters, DeviceErrors, read_or_none

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.system.device_counters import ErrorReader

KERNEL_LOG = Path("/dev/kmsg")
GPUS = Path("/proc/driver/nvidia/gpus")
"""One folder per GPU, named by PCI address, in NVML order."""
MESSAGE = re.compile(r"NVRM: Xid \(PCI:(?P<address>[0-9a-fA-F:.]+)\): (?P<code>\d+)")
RECORD_BYTES = 8192
"""Longest /dev/kmsg record (CONSOLE_EXT_LOG_MAX in Linux)."""


def start_energy_meter(uuid: str) -> Callable[[], float] | None:
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


def open_errors() -> ErrorReader:
    """Return a function that reads the XIDs of all GPUs from now on.

    It returns an empty tuple without an NVIDIA driver or permission to read the log.
    """
    try:
        addresses = sorted(path.name for path in GPUS.iterdir())
        log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return tuple
    os.lseek(log, 0, os.SEEK_END)
    return XidLog(log, addresses).read


class XidLog:
    """Counts the XIDs that the kernel logs for each GPU after construction."""

    def __init__(self, log: int, addresses: list[str]) -> None:
        self._log = log
        weakref.finalize(self, os.close, log)
        self._errors = {
            _normalize(address): DeviceErrors(str(index)) for index, address in enumerate(addresses)
        }

    def read(self) -> tuple[DeviceErrors, ...]:
        """Return each GPU's errors so far; messages about other addresses are ignored."""
        for message in self._read_messages():
            match = MESSAGE.search(message)
            errors = self._errors.get(_normalize(match["address"])) if match else None
            if match and errors:
                self._errors[_normalize(match["address"])] = replace(
                    errors, count=errors.count + 1, last_code=int(match["code"])
                )
        return tuple(self._errors.values())

    def _read_messages(self) -> list[str]:
        """Return new messages; some are lost if the kernel has overwritten them."""
        messages: list[str] = []
        while True:
            try:
                record = os.read(self._log, RECORD_BYTES)
            except OSError as error:
                if error.errno == errno.EPIPE:  # the next read returns the oldest one that is left
                    continue
                return messages
            if not record:
                return messages
            messages.append(record.decode(errors="replace"))


def _normalize(address: str) -> tuple[int, ...]:
    """Return the domain, bus and device of a PCI address, with or without a function number."""
    return tuple(int(part, 16) for part in address.split(".", maxsplit=1)[0].split(":"))
