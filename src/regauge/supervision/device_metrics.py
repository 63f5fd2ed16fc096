"""Exports the vendor's device counters and the driver's errors as metrics."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from regauge.accelerators import open_device_counters, open_device_errors
from regauge.monitoring import vocabulary
from regauge.monitoring.polled_source import PolledSource
from regauge.monitoring.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from regauge.accelerators import Accelerator
    from regauge.monitoring.vocabulary import Metric
    from regauge.system.host.device_counters import DeviceCounters, DeviceErrors

METRIC_BY_COUNTER: dict[str, Metric] = {
    "utilization": vocabulary.DEVICE_UTILIZATION,
    "memory_used_bytes": vocabulary.DEVICE_MEMORY_USED,
    "memory_total_bytes": vocabulary.DEVICE_MEMORY_TOTAL,
    "power_watts": vocabulary.DEVICE_POWER,
    "temperature_celsius": vocabulary.DEVICE_TEMPERATURE,
}


@contextmanager
def watch_devices(accelerator: Accelerator | None) -> Iterator[Callable[[], list[Sample]]]:
    """Yield a function that returns samples for all devices on this machine.

    Counters and errors are read in separate threads: a driver that does not answer cannot delay a
    sample or hide errors it has already logged. Without an accelerator, the devices are those of
    the first kind that has any.
    """
    with (
        PolledSource(lambda: open_device_counters(accelerator)) as counters,
        PolledSource(lambda: open_device_errors(accelerator)) as errors,
    ):
        yield lambda: [
            *describe_counters(counters.read() or ()),
            *_describe_errors(errors.read() or ()),
        ]


def describe_counters(devices: Iterable[DeviceCounters]) -> Iterator[Sample]:
    """Yield samples for the counters each device has."""
    for counters in devices:
        for name, metric in METRIC_BY_COUNTER.items():
            value = getattr(counters, name)
            if value is not None:
                yield Sample(metric, value, (counters.device,))


def _describe_errors(devices: Iterable[DeviceErrors]) -> Iterator[Sample]:
    for errors in devices:
        yield Sample(vocabulary.DEVICE_ERRORS, errors.count, (errors.device,))
        yield Sample(vocabulary.DEVICE_ERROR_CODE, errors.last_code, (errors.device,))
