"""Reads the snapshot of a server from its routes `/health` and `/metrics`."""

from __future__ import annotations

import http.client
import math
import os
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from regauge.commands._top.snapshot import (
    Column,
    Figure,
    FigureGroup,
    Snapshot,
    TableRow,
    ViewTable,
)
from regauge.monitoring import vocabulary
from regauge.serving.api_keys import VARIABLE as KEYS_VARIABLE
from regauge.system.errors import DataError, SettingsError, TransientError
from regauge.system.json_files import parse_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.samples import Sample

TIMEOUT_SECONDS = 2.0
MAX_ANSWER_BYTES = 1 << 24
UNAUTHORIZED = 401
COLUMNS = (
    Column("model", "MODEL", "text"),
    Column("version", "VERSION", "text"),
    Column("workers", "WORKERS", "number"),
    Column("queue_records", "QUEUE", "number"),
    Column("queue_wait_seconds", "WAIT", "seconds"),
)


class Counters(NamedTuple):
    """The counters of a server at one moment."""

    at: float
    """Seconds of the monotonic clock."""
    requests: dict[str, float]
    """Answered requests by status."""
    latency_buckets: dict[float, float]
    """Requests up to each latency in seconds, cumulative."""
    records: float
    batches: float


class ServerReader:
    """Reads a server; the rates are those since its last read."""

    poll_seconds = 1.0

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"'{url}' is no address of a server", "write http://host:port")
        self._url, self._parts = url.rstrip("/"), parts
        self._before: Counters | None = None

    def read(self) -> Snapshot:
        """Return the present state; raises TransientError if the server does not answer."""
        health = self._read_health()
        samples = _group_samples(self._get("/metrics")[1])
        now = _count(samples)
        before, self._before = self._before, now
        state = str(health.get("status") or "ready")
        return Snapshot(
            name=self._parts.netloc,
            verb="serve",
            state=state if state in ("ready", "overloaded") else "not ready",
            read_at=time.time(),
            reason="" if state in ("ready", "overloaded") else state,
            groups=(
                FigureGroup("Requests", tuple(_list_requests(now, before))),
                FigureGroup("Batches", tuple(_list_batches(samples, now, before))),
            ),
            table=ViewTable("Models", COLUMNS, tuple(_list_models(samples, health))),
        )

    def _read_health(self) -> dict[str, Any]:
        _, content = self._get("/health")
        try:
            return parse_object(content)
        except ValueError:
            return {}

    def _get(self, path: str) -> tuple[int, bytes]:
        """Return the status and the body of a route."""
        parts = self._parts
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)
        # The variable has the keys of the server; the first one is sent.
        key = os.environ.get(KEYS_VARIABLE, "").partition(",")[0].strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
            answer = connection.getresponse()
            content = answer.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            problem = f"{self._url}{path} does not answer: {error or type(error).__name__}"
            raise TransientError(problem, "start the server, or name another address") from None
        finally:
            connection.close()
        if answer.status == UNAUTHORIZED:
            raise SettingsError(f"{self._url}{path} needs an API key", f"set {KEYS_VARIABLE}")
        if path != "/health" and answer.status >= http.client.BAD_REQUEST:
            problem = f"{self._url}{path} answers with status {answer.status}"
            raise DataError(problem, "name the address of `regauge serve`")
        return answer.status, content


def _group_samples(content: bytes) -> dict[str, list[Sample]]:
    """Return the samples of a text in Prometheus' format, by name."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise SettingsError(str(error), "pip install 'regauge[serve]'") from None

    samples: dict[str, list[Sample]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families(content.decode(errors="replace")):
            for sample in family.samples:
                samples[sample.name].append(sample)
    except ValueError as error:
        problem = f"the metrics cannot be read: {error}"
        raise DataError(problem, "name the address of `regauge serve`") from None
    return samples


def _count(samples: Mapping[str, list[Sample]]) -> Counters:
    requests: dict[str, float] = defaultdict(float)
    for sample in samples[vocabulary.SERVE_REQUESTS.name]:
        requests[sample.labels.get("status", "")] += sample.value
    buckets: dict[float, float] = defaultdict(float)
    for sample in samples[f"{vocabulary.SERVE_REQUEST_SECONDS.name}_bucket"]:
        buckets[float(sample.labels["le"])] += sample.value
    batches = _sum(samples[f"{vocabulary.SERVE_BATCH_RECORDS.name}_count"])
    records = _sum(samples[vocabulary.SERVE_RECORDS.name])
    return Counters(time.monotonic(), requests, dict(sorted(buckets.items())), records, batches)


def _sum(samples: Iterable[Sample]) -> float:
    return sum(sample.value for sample in samples)


def _list_requests(now: Counters, before: Counters | None) -> Iterator[Figure]:
    total = sum(now.requests.values())
    seconds = now.at - before.at if before else None
    rate = (total - sum(before.requests.values())) / seconds if before and seconds else None
    refused = sum(count for status, count in now.requests.items() if status.startswith("4"))
    failed = sum(count for status, count in now.requests.items() if status.startswith("5"))
    yield Figure("requests", "answered", int(total))
    yield Figure("requests_per_second", "requests/s", rate)
    for share in (0.5, 0.95, 0.99):
        latency = _find_quantile(now, before, share)
        yield Figure(f"p{share * 100:.0f}_seconds", f"p{share * 100:.0f} s", latency)
    yield Figure("refused_requests", "status 4xx", int(refused))
    yield Figure("failed_requests", "status 5xx", int(failed))


def _find_quantile(now: Counters, before: Counters | None, share: float) -> float | None:
    """Return the limit of the bucket with a quantile, of the requests since the last read.

    If there were none, of all requests. Returns None without requests, or above all limits.
    """
    earlier = before.latency_buckets if before else {}
    new = {limit: count - earlier.get(limit, 0.0) for limit, count in now.latency_buckets.items()}
    buckets = new if max(new.values(), default=0.0) > 0 else now.latency_buckets
    total = max(buckets.values(), default=0.0)
    limits = [limit for limit, count in buckets.items() if total and count >= share * total]
    return next((limit for limit in limits if math.isfinite(limit)), None)


def _list_batches(
    samples: Mapping[str, list[Sample]], now: Counters, before: Counters | None
) -> Iterator[Figure]:
    seconds = now.at - before.at if before else None
    rate = (now.records - before.records) / seconds if before and seconds else None
    yield Figure("records", "records", int(now.records))
    yield Figure("records_per_second", "records/s", rate)
    mean = now.records / now.batches if now.batches else None
    yield Figure("records_per_batch", "per batch", mean)
    truncated = _sum(samples[vocabulary.SERVE_TRUNCATED_RECORDS.name])
    yield Figure("truncated_records", "truncated", int(truncated))
    tokens = _sum(samples[vocabulary.SERVE_PADDED_TOKENS.name])
    yield Figure("padded_tokens", "tokens", tokens, "count")


def _list_models(
    samples: Mapping[str, list[Sample]], health: Mapping[str, Any]
) -> Iterator[TableRow]:
    models = health.get("models")
    for name, state in (models if isinstance(models, dict) else {}).items():
        state = state if isinstance(state, dict) else {}  # noqa: PLW2901
        versions = [
            sample.labels.get("version", "")
            for sample in samples[f"{vocabulary.SERVE_MODEL_INFO.name}"]
            if sample.labels.get("model") == name and sample.value
        ]
        waits = [
            sample.value
            for sample in samples[vocabulary.SERVE_QUEUE_SECONDS.name]
            if sample.labels.get("model") == name
        ]
        values = {
            "model": name,
            "version": versions[0] if versions else None,
            "workers": state.get("workers"),
            "queue_records": state.get("waiting_records"),
            "queue_wait_seconds": waits[0] if waits else None,
        }
        yield TableRow(values, is_problem=not state.get("workers"))
