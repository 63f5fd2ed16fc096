"""Errors of NVIDIA GPUs (XIDs) from the kernel's log; no torch and no call of the driver here.

The driver of a GPU that fell off the bus may answer no call, but it has logged the error. Format of
a message: NVIDIA's "XID Errors" guide, "NVRM: Xid (PCI:0000:3b:00): 79, …".
"""

from __future__ import annotations

import errno
import os
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.system.host.device_counters import DeviceErrors

if TYPE_CHECKING:
    from regauge.system.host.device_counters import ErrorReader

KERNEL_LOG = Path("/dev/kmsg")
GPUS = Path("/proc/driver/nvidia/gpus")
"""Has one folder per GPU, named by its PCI address. In this order NVML numbers the GPUs."""
MESSAGE = re.compile(r"NVRM: Xid \(PCI:(?P<address>[0-9a-fA-F:.]+)\): (?P<code>\d+)")
RECORD_BYTES = 8192
"""The longest record of /dev/kmsg (CONSOLE_EXT_LOG_MAX of Linux)."""


def open_errors() -> ErrorReader:
    """Return a function that reads the XIDs of all GPUs from now on.

    It returns none without an NVIDIA driver or the right to read the log.
    """
    try:
        addresses = sorted(path.name for path in GPUS.iterdir())
        log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return tuple
    os.lseek(log, 0, os.SEEK_END)
    return XidLog(log, addresses).read


class XidLog:
    """Counts the XIDs of each GPU that the kernel logs after this object was created."""

    def __init__(self, log: int, addresses: list[str]) -> None:
        self._log = log
        weakref.finalize(self, os.close, log)
        self._errors = {
            _normalize(address): DeviceErrors(str(index)) for index, address in enumerate(addresses)
        }

    def read(self) -> tuple[DeviceErrors, ...]:
        """Return the errors of each GPU so far. Messages about other addresses are ignored."""
        for message in self._read_messages():
            match = MESSAGE.search(message)
            errors = self._errors.get(_normalize(match["address"])) if match else None
            if match and errors:
                self._errors[_normalize(match["address"])] = replace(
                    errors, count=errors.count + 1, last_code=int(match["code"])
                )
        return tuple(self._errors.values())

    def _read_messages(self) -> list[str]:
        """Return the new messages; the kernel has overwritten some if there were too many."""
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
    """Return domain, bus and device of a PCI address; its function may be absent."""
    return tuple(int(part, 16) for part in address.split(".", maxsplit=1)[0].split(":"))
