"""Metrics in Prometheus' text format, from vocabulary samples.

The series count is bounded: a run with thousands of metrics must not fill a Prometheus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from regauge.monitoring.vocabulary import METRICS, Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from regauge.monitoring.vocabulary import Sample

    Family = CounterMetricFamily | GaugeMetricFamily | InfoMetricFamily

MAX_SERIES = 1024
"""Maximum series per metric: one machine's 64 ranks in 10 phases, and a reserve."""
MAX_LABEL_CHARACTERS = 128


class SampleCollector(Collector):
    """Collects the samples returned by a function, as prometheus_client families."""

    def __init__(self, read_samples: Callable[[], Iterable[Sample]]) -> None:
        self._read_samples = read_samples

    def describe(self) -> list[Family]:
        """Return an empty list, so that registering does not read samples."""
        return []

    def collect(self) -> list[Family]:
        """Return the families in vocabulary order.

        Raises ValueError for a sample whose label count differs from the metric's.
        """
        by_metric: dict[Metric, dict[tuple[str, ...], float]] = {}
        for sample in self._read_samples():
            if len(sample.labels) != len(sample.metric.labels):
                raise ValueError(f"{sample.metric.name} needs the labels {sample.metric.labels}")
            series = by_metric.setdefault(sample.metric, {})
            labels = tuple(label[:MAX_LABEL_CHARACTERS] for label in sample.labels)
            if labels in series or len(series) < MAX_SERIES:
                series[labels] = sample.value
        return [
            _build_family(metric, by_metric[metric]) for metric in METRICS if metric in by_metric
        ]


def _build_family(metric: Metric, series: dict[tuple[str, ...], float]) -> Family:
    if metric.type == "info":
        info = InfoMetricFamily(metric.name.removesuffix("_info"), metric.help)
        for labels in series:
            info.add_metric((), dict(zip(metric.labels, labels, strict=True)))
        return info
    family: CounterMetricFamily | GaugeMetricFamily
    if metric.type == "counter":
        family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    elif metric.type == "gauge":
        family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    else:
        raise ValueError(f"{metric.name} is a {metric.type}; use prometheus_client's own class")
    for labels, value in series.items():
        family.add_metric(labels, value)
    return family


def render_samples(read_samples: Callable[[], Iterable[Sample]]) -> bytes:
    """Return samples in the text format."""
    registry = CollectorRegistry()
    registry.register(SampleCollector(read_samples))
    return generate_latest(registry)
