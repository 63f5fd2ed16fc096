"""Two live runs with one name on a real Prometheus: an alert for the stopped one alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from faults.conftest import Job, Jobs
from monitor.prometheus import start_prometheus, wait_until
from monitor.rule_tests import RULES
from monitor.test_run_metrics import find_rank_pid, start_job
from regauge.monitoring.bundle import render_server_files, write_monitoring_files
from regauge.monitoring.prometheus_settings import AlertThresholds, Prometheus

PROGRESS_SECONDS, WAIT_SECONDS = 20, 240.0
pytestmark = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="no Prometheus: apt-get install prometheus"
    ),
    pytest.mark.full,
]


def write_rules(folder: Path) -> list[str]:
    """Write the rules with a short limit for a run without a step."""
    thresholds = AlertThresholds(progress_seconds=PROGRESS_SECONDS)
    files = render_server_files(Prometheus(alerts=thresholds))
    write_monitoring_files(folder, {name: files[name] for name in RULES}, overwrite=True)
    return [str(folder / name) for name in sorted(RULES)]


def start_named(jobs: Jobs, monkeypatch: pytest.MonkeyPatch, folder: Path, targets: Path) -> Job:
    folder.mkdir(parents=True)
    monkeypatch.setattr(jobs.runs, "folder", lambda _: folder)
    return start_job(jobs, monitoring={"port": 0, "targets_folder": str(targets)})


def find_run_id(job: Job) -> str:
    identity = json.loads((job.folder / "run.json").read_text())["run"]
    return str(identity["run_id"])


def test_only_the_stopped_one_of_two_runs_with_one_name_fires(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = tmp_path / "targets"
    targets.mkdir()
    with ExitStack() as stack:
        rules = write_rules(tmp_path / "rules")
        server = stack.enter_context(start_prometheus(tmp_path / "prometheus", targets, rules))
        both = [
            start_named(jobs, monkeypatch, tmp_path / parent / "model", targets)
            for parent in ("a", "b")
        ]
        for job in both:
            job.wait_for_step(10)
        wait_until(lambda: len(server.query('regauge_run_info{run="model"}')) == 2, WAIT_SECONDS)
        ids = {series["metric"]["run_id"] for series in server.query("regauge_run_info")}
        assert len(ids) == 2
        stopped = both[1]
        pid = find_rank_pid(stopped, 1)
        os.kill(pid, signal.SIGSTOP)
        stack.callback(os.kill, pid, signal.SIGCONT)
        expression = 'ALERTS{alertname="RegaugeNoProgress",alertstate="firing"}'
        wait_until(lambda: server.query(expression), WAIT_SECONDS)
        (alert,) = server.query(expression)
        assert (alert["metric"]["run"], alert["metric"]["rank"]) == ("model", "1")
        assert alert["metric"]["run_id"] == find_run_id(stopped)
