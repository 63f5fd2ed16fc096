"""NVIDIA GPU errors (XIDs) from the kernel log; calls neither torch nor the driver.

The driver of a GPU that fell off the bus may not answer, but it has logged the error. Message
format: NVIDIA's "XID Errors" guide, "NVRM: Xid (PCI:0000:3b:00): 79, …".
"""

from __future__ import annotations

import errno
import os
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.system.device_counters import DeviceErrors

if TYPE_CHECKING:
    from regauge.system.device_counters import ErrorReader

KERNEL_LOG = Path("/dev/kmsg")
GPUS = Path("/proc/driver/nvidia/gpus")
"""One folder per GPU, named by PCI address, in NVML order."""
MESSAGE = re.compile(r"NVRM: Xid \(PCI:(?P<address>[0-9a-fA-F:.]+)\): (?P<code>\d+)")
RECORD_BYTES = 8192
"""Longest /dev/kmsg record (CONSOLE_EXT_LOG_MAX in Linux)."""


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
