"""A healthy training run, prediction job and server fire no alert, and every panel has data.

The runs are found as the guides document it: by the addresses in `monitoring.targets_folder`.
REGAUGE_HEALTHY_SECONDS sets how long they run; ten minutes have been tried.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from faults.conftest import Jobs
from monitor.prometheus import Prometheus, start_prometheus, wait_until
from monitor.rule_tests import write_rules
from monitor.test_inference_metrics import run_job
from monitor.test_live_prometheus import substitute
from monitor.test_run_metrics import start_job
from regauge.monitoring.dashboard_files import build_dashboards, list_expressions
from regauge.system.processes import find_free_port
from serve.servers import encoder, start_server

__all__ = ["encoder"]
PERIOD_SECONDS = float(os.environ.get("REGAUGE_HEALTHY_SECONDS", "30"))
WAIT_SECONDS = 240.0
PROBE_SECONDS = 0.5
DASHBOARDS = ("regauge-training", "regauge-prediction", "regauge-serving")
pytestmark = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="no Prometheus: apt-get install prometheus"
    ),
    pytest.mark.timeout(2 * WAIT_SECONDS + PERIOD_SECONDS + 300),
]


def list_empty_panels(server: Prometheus) -> list[str]:
    """Return the panels without data."""
    expressions = {
        f"{name}: {expression}": substitute(expression)
        for name in DASHBOARDS
        for expression in list_expressions(build_dashboards()[name])
    }
    return [name for name, expression in expressions.items() if not server.query(expression)]


def probe(port: int, statuses: list[int], is_over: threading.Event) -> None:
    """Ask for the state of a server at intervals, from before its start."""
    while not is_over.wait(PROBE_SECONDS):
        with suppress(httpx.HTTPError):
            statuses.append(httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code)


def test_healthy_work_fires_no_alert(jobs: Jobs, encoder: Path, tmp_path: Path) -> None:
    targets, port = tmp_path / "targets", find_free_port()
    targets.mkdir()
    statuses: list[int] = []
    is_over = threading.Event()
    prober = threading.Thread(target=probe, args=[port, statuses, is_over])
    (tmp_path / "predict").mkdir()
    with ExitStack() as stack:
        rules = write_rules(tmp_path / "rules")
        server = stack.enter_context(start_prometheus(tmp_path / "prometheus", targets, rules))
        prober.start()
        stack.callback(prober.join)
        stack.callback(is_over.set)
        served = stack.enter_context(
            start_server(
                tmp_path / "server", f"model={encoder}", "--port", str(port), is_ready=False
            )
        )
        wait_until(lambda: statuses, WAIT_SECONDS)
        group = {"targets": [f"127.0.0.1:{port}"], "labels": {"node": socket.gethostname()}}
        (targets / "server.json").write_text(json.dumps([group]))
        served.wait_until_ready()
        job = start_job(jobs, monitoring={"port": 0, "targets_folder": str(targets)})
        stack.enter_context(
            run_job(encoder, tmp_path / "predict", f"monitoring.targets_folder={targets}")
        )
        job.wait_for_step(10)

        def has_data() -> bool:
            served.embed(["w5 w6", "w7"])
            return not list_empty_panels(server)

        wait_until(has_data, WAIT_SECONDS, lambda: list_empty_panels(server))
        is_over.wait(PERIOD_SECONDS)
        served.embed(["w5 w6", "w7"])
        assert job.process is not None
        assert job.process.poll() is None
        fired = server.query('max_over_time(ALERTS{alertstate="firing"}[1h])')
        assert [series["metric"] for series in fired] == []
        assert {200, 503} >= set(statuses) >= {503}
        assert not server.query('regauge_serve_requests_total{route="/health"}')
