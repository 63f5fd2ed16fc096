"""Prometheus scrapes a real job of `predict` and a real server: every metric of both."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from end_to_end.predicting import write_records
from monitor.prometheus import Prometheus, start_prometheus, wait_until
from regauge.monitoring import vocabulary
from regauge.monitoring.exporter import EXPORTERS
from regauge.monitoring.vocabulary import Metric
from serve.servers import LENGTHS, encoder, start_server

__all__ = ["encoder"]
pytestmark = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="no Prometheus: apt-get install prometheus"
    ),
    pytest.mark.timeout(400),
]
WAIT_SECONDS = 120.0
RECORDS, SHARD_RECORDS = 200_000, 50
"""A job that would take minutes; the test ends it."""
USD_PER_HOUR, MAX_USD = 3.6, 5.0
JOB_METRICS = [
    metric for metric in vocabulary.METRICS if metric.name.startswith("regauge_predict_")
]
JOB_METRICS += [vocabulary.RUN_COST, vocabulary.RUN_BUDGET]
TEXT_METRICS = {
    vocabulary.SERVE_FIRST_TOKEN_SECONDS,
    vocabulary.SERVE_PROMPT_TOKENS,
    vocabulary.SERVE_GENERATION_TOKENS,
    vocabulary.SERVE_KV_CACHE_BLOCKS,
    vocabulary.SERVE_KV_CACHE_USAGE,
}
"""Those of models that generate text; `tests/serve/test_text_routes.py` reads them."""
SERVER_METRICS = [
    metric
    for metric in vocabulary.METRICS
    if metric.name.startswith("regauge_serve_") and metric not in TEXT_METRICS
]


def list_missing(server: Prometheus, metrics: list[Metric]) -> list[str]:
    """Return the metrics that have not been scraped; a histogram has buckets, a sum and a count."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    names = [metric.name + end for metric in metrics for end in suffixes.get(metric.type, ("",))]
    return [name for name in names if not server.query(name)]


@contextmanager
def run_job(artifact: Path, folder: Path, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `predict` on many records, of which the first has no text; write to `out`."""
    source, out = write_records(folder / "texts.jsonl", RECORDS), folder / "out"
    source.write_text('{"id": -1}\n' + source.read_text())
    options = [
        "monitoring.port=0",
        f"predict.shard_records={SHARD_RECORDS}",
        f"predict.max_usd={MAX_USD}",
        "execution.workers=1",
        f"execution.price.usd_per_hour={USD_PER_HOUR}",
        *overrides,
    ]
    files = ["--source", str(source), "--to", str(out)]
    command = [sys.executable, "-m", "regauge", "predict", str(artifact), *files, *options]
    with (
        (folder / "log.txt").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            yield process
            assert process.poll() is None, (folder / "log.txt").read_text()
        finally:
            process.terminate()
            process.wait(60)


def test_every_metric_of_a_predict_job_arrives(encoder: Path, tmp_path: Path) -> None:
    exporters = tmp_path / "out" / "jobs" / "0-of-1" / EXPORTERS
    with (
        start_prometheus(tmp_path / "prometheus", exporters) as server,
        run_job(encoder, tmp_path) as process,
    ):
        enough = f"regauge_predict_records_total > {2 * SHARD_RECORDS}"
        wait_until(lambda: server.query(enough) or process.poll() is not None, WAIT_SECONDS)
        assert process.poll() is None, (tmp_path / "log.txt").read_text()
        assert list_missing(server, JOB_METRICS) == []
        # a shard in work may wait for its commit beside the one that is computed
        shards = server.values("regauge_predict_shards", "state")
        assert shards.keys() == set(vocabulary.PREDICT_STATES)
        assert shards["finished"] >= 2
        assert shards["running"] >= 1
        assert shards["requeued"] == 0
        assert server.values("regauge_predict_failed_records_total", "run") == {"out": 1}
        assert server.values("regauge_predict_workers", "run") == {"out": 1}
        assert server.values("regauge_run_budget_usd", "run") == {"out": MAX_USD}
        [cost] = server.values("regauge_run_cost_usd_total", "run").values()
        assert 0 < cost < USD_PER_HOUR * WAIT_SECONDS / 3600
        [info] = server.query("regauge_run_info")
        assert info["metric"]["verb"] == "predict"
        assert info["metric"]["run_id"].endswith("-0-of-1")
        # finished shards never have more records than their size
        finished = 'ignoring (state) regauge_predict_shards{state="finished"}'
        full = f"regauge_predict_records_total / {finished} <= {SHARD_RECORDS}"
        assert server.query(full)


def test_every_metric_of_a_server_arrives(encoder: Path, tmp_path: Path) -> None:
    exporters = tmp_path / "exporters"
    exporters.mkdir()
    texts = ["w5 w6", "w7 " * 10, "w8 " * (2 * LENGTHS[-1])]
    with (
        start_server(tmp_path / "server", f"model={encoder}", "serve.overflow=truncate") as served,
        start_prometheus(tmp_path / "prometheus", exporters) as server,
    ):
        target = [{"targets": [urlsplit(served.address).netloc]}]
        (exporters / "server.json").write_text(json.dumps(target))
        assert served.embed(texts).shape[0] == len(texts)
        assert served.post("/embed", {}).status_code == httpx.codes.UNPROCESSABLE_ENTITY
        wait_until(
            lambda: server.query("regauge_serve_records_total > 0"),
            WAIT_SECONDS,
            lambda: served.get("/metrics").text,
        )
        assert list_missing(server, SERVER_METRICS) == []
        requests = 'regauge_serve_requests_total{route="/embed"}'
        assert server.values(requests, "status") == {"200": 1, "422": 1}
        counts = server.values('regauge_serve_request_seconds_count{route="/embed"}', "model")
        assert counts == {"model": 1, "": 1}, "a refused request names no model"
        times = server.values('regauge_serve_request_seconds_sum{route="/embed"}', "model")
        seconds = times["model"]
        phases = server.values("regauge_serve_phase_seconds_total", "phase")
        assert phases.keys() == {"read", "tokenize", "compute", "serialize"}
        assert min(phases.values()) > 0
        assert phases["compute"] < seconds < WAIT_SECONDS
        assert server.values("regauge_serve_records_total") == {"": len(texts)}
        assert server.values("regauge_serve_batch_records_sum") == {"": len(texts)}
        [tokens] = server.values("regauge_serve_padded_tokens_total").values()
        assert 2 + 10 + LENGTHS[-1] <= tokens <= len(texts) * LENGTHS[-1]
        assert server.values("regauge_serve_truncated_records_total") == {"": 1}
        assert server.values("regauge_serve_workers", "model") == {"model": 1}
        assert server.values("regauge_serve_queue_records", "model") == {"model": 0}
        [wait] = server.values("regauge_serve_queue_wait_seconds", "model").values()
        assert 0 <= wait < WAIT_SECONDS
        assert server.values("regauge_serve_draining") == {"": 0}
        [info] = server.query("regauge_serve_model_info")
        assert info["metric"]["model"] == "model"
        assert len(info["metric"]["version"]) == 12
