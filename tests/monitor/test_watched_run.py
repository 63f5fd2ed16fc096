"""A run of two ranks that `monitor up` watches: its metrics, and an alert on a stopped rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faults.families import list_ranks
from launch.training_jobs import Workplace, create_workplace
from loopback import answer_requests
from monitor.conftest import Webhook, read_document, require_programs, start_monitor
from monitor.prometheus_queries import query, wait_for
from monitor.test_live_prometheus import substitute
from regauge.monitoring.dashboard_files import build_dashboards, list_expressions

ALERT = "RegaugeNoProgress"
ABSENT = {
    "regauge_train_mfu_ratio": "a CPU has no published peak",
    "regauge_run_failures_total": "no attempt failed",
    "regauge_rank_device_memory_bytes": "a CPU has no memory of its own",
    "regauge_run_cost_usd_total": "the run has no price",
    "regauge_run_budget_usd": "the run has no budget",
}
"""Metrics that this run does not have, each with the reason."""


@contextmanager
def start_run(workplace: Workplace) -> Iterator[subprocess.Popen[bytes]]:
    """Train with two ranks for the duration of a block."""
    changes = {
        "stop": {"steps": 1_000_000},
        "monitoring": {"port": 0},
        "execution": {"processes": 2, "timeout_seconds": 120},
        "evaluation": {"every_steps": 50},
        "output": {"log_every_steps": 5},
    }
    run_file = workplace.write_run("watched", **changes)
    command = [sys.executable, "-m", "regauge", "train", str(run_file)]
    log = (workplace.root / "train.log").open("w")
    with log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield process
        finally:
            for pid in list_ranks(process.pid):
                os.kill(pid, signal.SIGCONT)
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def list_training_expressions() -> dict[str, str]:
    """Return the queries of the training dashboard for which this run has data."""
    expressions = list_expressions(build_dashboards()["regauge-training"])
    return {
        text: substitute(text) for text in expressions if not any(name in text for name in ABSENT)
    }


@pytest.mark.timeout(900)
def test_a_stopped_rank_is_named_by_an_alert_that_resolves(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    require_programs()
    workplace = create_workplace(tmp_path_factory.mktemp("watched"))
    webhook = Webhook()
    with (
        answer_requests(webhook.respond, "webhook") as sink,
        start_run(workplace) as run,
        start_monitor(workplace.root, [], sink) as monitor,
    ):
        url = read_document(monitor)["prometheus"]
        expressions = list_training_expressions()

        def list_missing() -> list[str]:
            return [text for text, query_text in expressions.items() if not query(url, query_text)]

        wait_for(lambda: not list_missing(), 120)
        assert list_missing() == []
        assert webhook.find_state(ALERT) != "firing"
        ranks = list_ranks(run.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGSTOP)
        firing = f'ALERTS{{alertname="{ALERT}", alertstate="firing"}}'
        series = wait_for(lambda: query(url, firing), 60)
        assert [item["metric"]["rank"] for item in series] == ["1"]
        assert wait_for(lambda: webhook.find_state(ALERT) == "firing")
        os.kill(ranks[1], signal.SIGCONT)
        assert wait_for(lambda: not query(url, firing), 60)
        assert wait_for(lambda: webhook.find_state(ALERT) == "resolved")
    assert not list(Path(workplace.root, "out-watched").glob("exporters/*"))
