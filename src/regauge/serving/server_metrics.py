"""The metrics of the server, in the text format of Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

if TYPE_CHECKING:
    from regauge.serving.scheduler import ScheduledBatch

LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper limits of the latency histogram, in seconds."""
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServerMetrics:
    """Counters and histograms of a server, in a registry of their own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "regauge_requests", "Answered requests.", ("route", "status"), registry=registry
        )
        self._latency = Histogram(
            "regauge_request_seconds",
            "Time from the headers of a request to its answer.",
            ("route",),
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._phases = Counter(
            "regauge_phase_seconds",
            "Time of the server per phase: read, tokenize, compute, serialize.",
            ("phase",),
            registry=registry,
        )
        self._records = Counter("regauge_records", "Computed records.", registry=registry)
        self._tokens = Counter(
            "regauge_padded_tokens", "Computed tokens, padding included.", registry=registry
        )
        self._truncated = Counter(
            "regauge_truncated_records", "Records that were truncated.", registry=registry
        )
        self._batch_rows = Histogram(
            "regauge_batch_records", "Records per batch.", buckets=BATCH_BUCKETS, registry=registry
        )

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Count an answered request with its latency."""
        self._requests.labels(route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def add_phase(self, phase: str, seconds: float) -> None:
        """Add time to a phase."""
        self._phases.labels(phase).inc(seconds)

    def count_batch(self, batch: ScheduledBatch, milliseconds: float) -> None:
        """Count a computed batch."""
        count = len(batch.records)
        self._phases.labels("compute").inc(milliseconds / 1e3)
        self._records.inc(count)
        self._tokens.inc(count * batch.length)
        self._batch_rows.observe(count)

    def count_truncated(self, count: int) -> None:
        """Count truncated records."""
        if count:
            self._truncated.inc(count)

    def render(self) -> bytes:
        """Return all metrics in the text format."""
        return generate_latest(self._registry)
