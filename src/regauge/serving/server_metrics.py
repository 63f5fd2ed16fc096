"""Server metrics in Prometheus text format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from regauge.monitoring import vocabulary
from regauge.monitoring.exposition import SampleCollector
from regauge.monitoring.vocabulary import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from regauge.monitoring.vocabulary import Metric
    from regauge.serving.model_slot import ModelSlot
    from regauge.serving.scheduler import ScheduledBatch

LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the latency histogram, in seconds."""
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


UNKNOWN_ROUTE = "unknown"
"""Label for all requests without a route: their paths would be unlimited labels."""
VERSION_CHARACTERS = 12
"""How many characters of a version's hash are shown, as in the server log."""


class ServerMetrics:
    """A server's counters and histograms, in their own registry."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = _build_counter(vocabulary.SERVE_REQUESTS, registry)
        self._latency = _build_histogram(
            vocabulary.SERVE_REQUEST_SECONDS, LATENCY_BUCKETS, registry
        )
        self._phases = _build_counter(vocabulary.SERVE_PHASE_SECONDS, registry)
        self._records = _build_counter(vocabulary.SERVE_RECORDS, registry)
        self._tokens = _build_counter(vocabulary.SERVE_PADDED_TOKENS, registry)
        self._truncated = _build_counter(vocabulary.SERVE_TRUNCATED_RECORDS, registry)
        self._first_token = _build_histogram(
            vocabulary.SERVE_FIRST_TOKEN_SECONDS, LATENCY_BUCKETS, registry
        )
        self._prompt_tokens = _build_counter(vocabulary.SERVE_PROMPT_TOKENS, registry)
        self._generation_tokens = _build_counter(vocabulary.SERVE_GENERATION_TOKENS, registry)
        self._batch_rows = _build_histogram(vocabulary.SERVE_BATCH_RECORDS, BATCH_BUCKETS, registry)

    def watch(self, slots: Mapping[str, ModelSlot], is_draining: Callable[[], bool]) -> None:
        """Add the queues, workers and versions of models, and whether new requests are refused.

        They are read on each export.
        """
        self._registry.register(SampleCollector(lambda: _describe_models(slots)))
        self._registry.register(
            SampleCollector(lambda: [Sample(vocabulary.SERVE_DRAINING, is_draining())])
        )

    def count_request(self, route: str, model: str, status: int, seconds: float) -> None:
        """Count an answer; `model` is empty if no model was needed."""
        self._requests.labels(route, model, str(status)).inc()
        self._latency.labels(route, model).observe(seconds)

    def count_unknown_route(self, status: int) -> None:
        """Count an answer to a path or method without a route."""
        self._requests.labels(UNKNOWN_ROUTE, "", str(status)).inc()

    def add_phase(self, phase: str, seconds: float) -> None:
        self._phases.labels(phase).inc(seconds)

    def count_batch(self, batch: ScheduledBatch, milliseconds: float) -> None:
        count = len(batch.records)
        self._phases.labels("compute").inc(milliseconds / 1e3)
        self._records.inc(count)
        self._tokens.inc(count * batch.length)
        self._batch_rows.observe(count)

    def count_truncated(self, count: int) -> None:
        if count:
            self._truncated.inc(count)

    def count_first_token(self, model: str, num_prompt_tokens: int, seconds: float) -> None:
        """Count a prompt whose answer begins after some time."""
        self._first_token.labels(model).observe(seconds)
        self._prompt_tokens.labels(model).inc(num_prompt_tokens)

    def count_generated_token(self, model: str) -> None:
        self._generation_tokens.labels(model).inc()

    def render(self) -> bytes:
        """Return all metrics in text format."""
        return generate_latest(self._registry)


def _build_counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    return Counter(metric.name, metric.help, metric.labels, registry=registry)


def _build_histogram(
    metric: Metric, buckets: Sequence[float], registry: CollectorRegistry
) -> Histogram:
    return Histogram(metric.name, metric.help, metric.labels, buckets=buckets, registry=registry)


def _describe_models(slots: Mapping[str, ModelSlot]) -> Iterator[Sample]:
    """Yield samples for all models; only a loaded model has a number of workers."""
    for name, slot in slots.items():
        current, labels = slot.current, (name,)
        if current is not None:
            yield Sample(vocabulary.SERVE_WORKERS, len(current.worker_pids), labels)
        num_waiting = current.num_waiting if current else 0
        yield Sample(vocabulary.SERVE_QUEUE_RECORDS, num_waiting, labels)
        wait_seconds = current.estimate_wait() if current else 0.0
        yield Sample(vocabulary.SERVE_QUEUE_SECONDS, wait_seconds, labels)
        num_used, num_blocks = current.count_cache_blocks() if current else (0, 0)
        if num_blocks:
            yield Sample(vocabulary.SERVE_KV_CACHE_BLOCKS, num_blocks, labels)
            yield Sample(vocabulary.SERVE_KV_CACHE_USAGE, num_used / num_blocks, labels)
        for version in filter(None, (current, slot.canary)):
            sha256 = version.content_sha256[:VERSION_CHARACTERS]
            yield Sample(vocabulary.SERVE_MODEL_INFO, 1, (name, sha256))
