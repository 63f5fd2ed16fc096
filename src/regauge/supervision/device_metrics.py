"""The vendor's counters of devices as metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.monitoring import vocabulary
from regauge.monitoring.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from regauge.accelerators import DeviceCounters
    from regauge.monitoring.vocabulary import Metric

METRIC_BY_COUNTER: dict[str, Metric] = {
    "utilization": vocabulary.DEVICE_UTILIZATION,
    "memory_used_bytes": vocabulary.DEVICE_MEMORY_USED,
    "memory_total_bytes": vocabulary.DEVICE_MEMORY_TOTAL,
    "power_watts": vocabulary.DEVICE_POWER,
    "temperature_celsius": vocabulary.DEVICE_TEMPERATURE,
}


def describe_devices(devices: Iterable[DeviceCounters]) -> Iterator[Sample]:
    """Yield the samples of the counters that each device has."""
    for counters in devices:
        for name, metric in METRIC_BY_COUNTER.items():
            value = getattr(counters, name)
            if value is not None:
                yield Sample(metric, value, (counters.device,))
