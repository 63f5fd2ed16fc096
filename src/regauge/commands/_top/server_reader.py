"""Reads a server snapshot from the routes `/health` and `/metrics`."""

from __future__ import annotations

import http.client
import math
import os
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from regauge.commands._top.snapshot import Snapshot, TableRow
from regauge.monitoring import vocabulary
from regauge.serving.api_keys import VARIABLE as KEYS_VARIABLE
from regauge.system.errors import DataError, SettingsError, TransientError
from regauge.system.json_files import parse_object

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.samples import Sample

    from regauge.commands._top.snapshot import Value

TIMEOUT_SECONDS = 2.0
MAX_ANSWER_BYTES = 1 << 24
UNAUTHORIZED = 401
QUANTILES = {"p50_seconds": 0.5, "p95_seconds": 0.95, "p99_seconds": 0.99}


class ServerReader:
    """Reads a server; rates count since the last read."""

    poll_seconds = 1.0

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"'{url}' is not a server address", "write http://host:port")
        self._url, self._parts = url.rstrip("/"), parts
        self._before: _Samples | None = None

    def read(self) -> Snapshot:
        """Return the present state; raises TransientError if the server does not answer."""
        try:
            health = parse_object(self._get("/health"))
        except ValueError:
            health = {}
        now = _Samples(self._get("/metrics"))
        before, self._before = self._before, now
        state = str(health.get("status") or "ready")
        is_known = state in ("ready", "overloaded")
        return Snapshot(
            name=self._parts.netloc,
            verb="serve",
            state=state if is_known else "not ready",
            read_at=time.time(),
            groups={
                "requests": _list_requests(now, before),
                "batches": _list_batches(now, before),
            },
            table="models",
            rows=tuple(_list_models(now, health)),
            reason="" if is_known else state,
        )

    def _get(self, path: str) -> bytes:
        """Return a route's body; only the `/health` status may be an error."""
        parts, client = self._parts, http.client
        kind = client.HTTPSConnection if parts.scheme == "https" else client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)
        # The variable has the keys of the server; the first one is sent.
        key = os.environ.get(KEYS_VARIABLE, "").partition(",")[0].strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
            answer = connection.getresponse()
            content = answer.read(MAX_ANSWER_BYTES)
        except (OSError, client.HTTPException) as error:
            problem = f"{self._url}{path} does not answer: {error or type(error).__name__}"
            raise TransientError(problem, "start the server, or name another address") from None
        finally:
            connection.close()
        if answer.status == UNAUTHORIZED:
            raise SettingsError(f"{self._url}{path} needs an API key", f"set {KEYS_VARIABLE}")
        if path != "/health" and answer.status >= client.BAD_REQUEST:
            problem = f"{self._url}{path} answers with status {answer.status}"
            raise DataError(problem, "name the address of `regauge serve`")
        return content


class _Samples:
    def __init__(self, content: bytes) -> None:
        try:
            from prometheus_client.parser import text_string_to_metric_families
        except ImportError as error:
            raise SettingsError(str(error), "pip install 'regauge[serve]'") from None

        self.at = time.monotonic()
        self._by_name: dict[str, list[Sample]] = defaultdict(list)
        try:
            for family in text_string_to_metric_families(content.decode(errors="replace")):
                for sample in family.samples:
                    self._by_name[sample.name].append(sample)
        except ValueError as error:
            problem = f"the metrics cannot be read: {error}"
            raise DataError(problem, "name the address of `regauge serve`") from None

    def list(self, name: str, **labels: str) -> list[Sample]:
        """Return a metric's samples whose labels begin with these values."""
        return [
            sample
            for sample in self._by_name[name]
            if all(sample.labels.get(key, "").startswith(labels[key]) for key in labels)
        ]

    def sum(self, name: str, **labels: str) -> float:
        return sum(sample.value for sample in self.list(name, **labels))

    def rate(self, name: str, before: _Samples | None) -> float | None:
        """Return a counter's increase per second; None at the first read."""
        if before is None or self.at <= before.at:
            return None
        return (self.sum(name) - before.sum(name)) / (self.at - before.at)

    def sum_buckets(self, name: str) -> dict[float, float]:
        """Return upper limit -> cumulative count for a histogram, in order."""
        buckets: dict[float, float] = defaultdict(float)
        for sample in self.list(f"{name}_bucket"):
            buckets[float(sample.labels["le"])] += sample.value
        return dict(sorted(buckets.items()))


def _list_requests(now: _Samples, before: _Samples | None) -> dict[str, Value]:
    name = vocabulary.SERVE_REQUESTS.name
    return {
        "requests": int(now.sum(name)),
        "requests_per_second": now.rate(name, before),
        **{key: _find_quantile(now, before, share) for key, share in QUANTILES.items()},
        "refused_requests": int(now.sum(name, status="4")),
        "failed_requests": int(now.sum(name, status="5")),
    }


def _find_quantile(now: _Samples, before: _Samples | None, share: float) -> float | None:
    """Return the limit of the bucket with a quantile, for requests since the last read.

    Without such requests, for all requests. Returns None without requests, or above all limits.
    """
    name = vocabulary.SERVE_REQUEST_SECONDS.name
    every, earlier = now.sum_buckets(name), before.sum_buckets(name) if before else {}
    new = {limit: count - earlier.get(limit, 0.0) for limit, count in every.items()}
    buckets = new if max(new.values(), default=0.0) > 0 else every
    total = max(buckets.values(), default=0.0)
    limits = [limit for limit, count in buckets.items() if total and count >= share * total]
    return next((limit for limit in limits if math.isfinite(limit)), None)


def _list_batches(now: _Samples, before: _Samples | None) -> dict[str, Value]:
    records = now.sum(vocabulary.SERVE_RECORDS.name)
    batches = now.sum(f"{vocabulary.SERVE_BATCH_RECORDS.name}_count")
    return {
        "records": int(records),
        "records_per_second": now.rate(vocabulary.SERVE_RECORDS.name, before),
        "records_per_batch": records / batches if batches else None,
        "truncated_records": int(now.sum(vocabulary.SERVE_TRUNCATED_RECORDS.name)),
        "padded_tokens": now.sum(vocabulary.SERVE_PADDED_TOKENS.name),
    }


def _list_models(now: _Samples, health: dict[str, Any]) -> Iterator[TableRow]:
    models = health.get("models")
    for name, entry in (models if isinstance(models, dict) else {}).items():
        state = entry if isinstance(entry, dict) else {}
        versions, waits = (
            [sample for sample in now.list(metric.name) if sample.labels.get("model") == name]
            for metric in (vocabulary.SERVE_MODEL_INFO, vocabulary.SERVE_QUEUE_SECONDS)
        )
        current = [sample.labels.get("version", "") for sample in versions if sample.value]
        values = {
            "model": name,
            "version": next(iter(current), None),
            "workers": state.get("workers"),
            "queue_records": state.get("waiting_records"),
            "queue_wait_seconds": waits[0].value if waits else None,
        }
        yield TableRow(values, is_problem=not state.get("workers"))
