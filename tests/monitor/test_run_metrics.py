"""Prometheus scrapes a real run of two processes: every metric, and a rank that is stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from faults.conftest import Job, Jobs
from monitor.prometheus import Prometheus, start_prometheus, wait_until
from regauge.monitoring import vocabulary
from regauge.monitoring.exporter import EXPORTERS, find_targets
from regauge.run_folders.node_status import read_node_statuses

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no Prometheus: apt-get install prometheus"
)
WAIT_SECONDS = 300.0
OPTIONAL = {
    vocabulary.DEVICE_POWER,
    vocabulary.DEVICE_TEMPERATURE,
    vocabulary.DEVICE_ERRORS,
    vocabulary.DEVICE_ERROR_CODE,
}
"""Metrics that this machine may not have; tests of counters and XIDs in tests/unit have them."""
RUN_METRICS = [
    metric
    for metric in vocabulary.METRICS
    if not metric.name.startswith(("regauge_serve_", "regauge_predict_")) and metric not in OPTIONAL
]
MAX_SERIES = 200
"""Upper limit of the series of a run of two processes."""


def start_job(jobs: Jobs, steps: int = 100_000, **changes: Any) -> Job:
    """Start a run of two processes with a free port of its metrics."""
    options: dict[str, Any] = {
        "stop": {"steps": steps, "usd": 1000.0},
        "evaluation": {"every_steps": 10},
        "output": {"log_every_steps": 2, "checkpoint": {"every_steps": 5}},
        "execution": {
            "price": {"usd_per_hour": 3.6},
            "supervision": {"hang_timeout_seconds": 600.0},
        },
        "monitoring": {"port": 0},
    }
    return jobs.create(**{**options, **changes}).start()


def wait_for_value(server: Prometheus, expression: str) -> None:
    """Wait until a query returns a series."""
    wait_until(lambda: server.query(expression), WAIT_SECONDS, lambda: f"no data: {expression}")


def stop(job: Job) -> None:
    """Stop the command of a run, and wait for it."""
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)
    job.wait()


def read_text(job: Job) -> str:
    """Return the metrics of a run."""
    (target,) = find_targets(job.folder)
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def find_rank_pid(job: Job, rank: int) -> int:
    """Return the process of a rank, from the status files of the run."""
    wait_until(lambda: read_node_statuses(job.folder), WAIT_SECONDS)
    return read_node_statuses(job.folder)[0].processes[rank].pid


def test_every_metric_of_a_run_arrives(
    jobs: Jobs, tmp_path: Path, figure: Callable[[str, float], None]
) -> None:
    job = start_job(jobs)
    with start_prometheus(tmp_path / "prometheus", job.folder / EXPORTERS) as server:
        for metric in RUN_METRICS:
            wait_for_value(server, metric.name)
        (count,) = server.query("count({__name__=~'regauge_.*'})")
        figure("series of a run of two processes", float(count["value"][1]))
        assert float(count["value"][1]) <= MAX_SERIES
        assert server.values("regauge_rank_alive") == {"0": 1, "1": 1}
        assert server.values("regauge_rank_progressing") == {"0": 1, "1": 1}
        assert server.values("regauge_rank_healthy") == {"0": 1, "1": 1}
        assert server.values("regauge_run_planned_steps", "run") == {job.folder.name: 100_000}
        for rank, step in server.values("regauge_rank_step").items():
            wait_for_value(server, f'regauge_rank_step{{rank="{rank}"}} > {step}')
        wait_for_value(server, "regauge_run_cost_usd_total > 0")
        wait_for_value(server, "time() - regauge_run_checkpoint_timestamp_seconds < 60")
        wait_for_value(server, "regauge_run_goodput_ratio > 0 and regauge_run_goodput_ratio <= 1")
        stop(job)
    assert not find_targets(job.folder)


def test_promtool_accepts_the_metrics_of_a_run(jobs: Jobs) -> None:
    job = start_job(jobs)
    job.wait_for_step(10)
    text = read_text(job)
    stop(job)
    command = ["promtool", "check", "metrics"]
    checked = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert not checked.stdout + checked.stderr
    names = {family.name for family in text_string_to_metric_families(text)}
    known = {metric.name.removesuffix("_total") for metric in vocabulary.METRICS}
    assert names <= known


def test_a_stopped_rank_is_alive_and_makes_no_progress(jobs: Jobs, tmp_path: Path) -> None:
    job = start_job(jobs)
    with start_prometheus(tmp_path / "prometheus", job.folder / EXPORTERS) as server:
        job.wait_for_step(10)
        pid = find_rank_pid(job, 1)
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_for_value(server, 'regauge_rank_progressing{rank="1"} == 0')
            assert server.values("regauge_rank_alive") == {"0": 1, "1": 1}
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for_value(server, 'regauge_rank_progressing{rank="1"} == 1')
        stop(job)


def test_failures_are_counted_over_attempts(jobs: Jobs, tmp_path: Path) -> None:
    job = start_job(jobs)
    with start_prometheus(tmp_path / "prometheus", job.folder / EXPORTERS) as server:
        job.wait_for_step(10)
        wait_for_value(server, 'regauge_run_failures_total{kind="process"} == 0')
        os.kill(find_rank_pid(job, 1), signal.SIGKILL)
        wait_for_value(server, 'regauge_run_failures_total{kind="process"} == 1')
        wait_for_value(server, "regauge_run_attempt == 2")
        stop(job)
