"""Checks the vendor's device counters: a counter may exist and never have a value."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING

from regauge.accelerators import open_device_counters
from regauge.monitoring.polled_source import PolledSource
from regauge.supervision.health.findings import Finding
from regauge.system.host.device_counters import DeviceCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from regauge.accelerators import Accelerator

CHECK = "counters"
SAMPLE_SECONDS = 0.1
COUNTERS = tuple(field.name for field in fields(DeviceCounters) if field.name != "device")
Reading = tuple[DeviceCounters, ...]


@contextmanager
def record_counters(accelerator: Accelerator) -> Iterator[list[Reading]]:
    """Yield a list to which counter readings are appended during the block.

    The block should use the devices, because an idle device may have a utilization of 0.
    """
    readings: list[Reading] = []

    def open_reader() -> Callable[[], None]:
        read = open_device_counters(accelerator)
        return lambda: readings.append(read())

    with PolledSource(open_reader, SAMPLE_SECONDS):
        yield readings


def judge_counters(readings: Sequence[Reading]) -> list[Finding]:
    """Return a finding per device: the counters, and those that are empty or always 0.

    Such a counter does not prevent a run, so the findings are never bad.
    """
    devices = dict.fromkeys(counters.device for reading in readings for counters in reading)
    if not devices:
        return [Finding(CHECK, "this machine", "none: the vendor's library found no device")]
    return [_judge_device(device, readings) for device in devices]


def _judge_device(device: str, readings: Sequence[Reading]) -> Finding:
    local = [counters for reading in readings for counters in reading if counters.device == device]
    values = {
        name: [value for counters in local if (value := getattr(counters, name)) is not None]
        for name in COUNTERS
    }
    empty = [name for name in COUNTERS if not values[name]]
    zero = [name for name in COUNTERS if values[name] and not any(values[name])]
    useful = [name for name in COUNTERS if name not in (*empty, *zero)]
    problems = [
        f"{state}: {', '.join(names)}"
        for state, names in (("always 0", zero), ("empty", empty))
        if names
    ]
    return Finding(CHECK, f"device {device}", ", ".join(useful), "; ".join(problems))
