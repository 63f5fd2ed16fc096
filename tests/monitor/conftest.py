"""Supervised runs, and a running `regauge monitor up` with a root of runs and pages of metrics."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from distributed.conftest import runs, worlds
from distributed.runs import Runs
from faults.conftest import Jobs
from loopback import Answer, Request, answer_requests
from monitor.metrics_pages import (
    Page,
    Vocabulary,
    render_dcgm,
    render_incomplete_runs,
    render_other_vendors,
    serve_page,
)
from monitor.prometheus_queries import list_firing, query
from regauge.system.processes import find_free_port

__all__ = ["runs", "worlds"]

THRESHOLDS = {
    "alive_seconds": 1,
    "progress_seconds": 5,
    "checkpoint_seconds": 5,
    "drain_seconds": 1,
    "missing_seconds": 3,
    "zero_seconds": 5,
}


class Webhook:
    """Notifications that Alertmanager sent: pairs of an alert's name and its state."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def find_state(self, alert: str) -> str:
        """Return the last state that was sent of an alert; empty if none was sent."""
        with self._lock:
            return next((state for name, state in reversed(self.events) if name == alert), "")

    def respond(self, request: Request) -> Answer:
        """Record the alerts of a notification."""
        alerts = json.loads(request.body)["alerts"]
        with self._lock:
            self.events += [(alert["labels"]["alertname"], alert["status"]) for alert in alerts]
        return 200, b"", {}


@dataclass
class DcgmState:
    """What the exporters of NVIDIA devices show."""

    xid: int | None = None
    drop: tuple[str, ...] = ()


@dataclass
class MonitorSystem:
    """A running `monitor up` with its targets."""

    root: Path
    url: str
    process: subprocess.Popen[str]
    vocabulary: Vocabulary
    webhook: Webhook
    dcgm: DcgmState
    pages: dict[str, Page] = field(default_factory=dict)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of an expression now."""
        return query(self.url, expression)

    def list_firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        return list_firing(self.url)

    def announce(self, run: str, address: str) -> Path:
        """Write the address file of a run, as its exporter does; return the file."""
        path = self.root / run / "exporters" / "rank-0.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        group = {"targets": [address], "labels": {"node": socket.gethostname()}}
        path.write_text(json.dumps([group]))
        return path


def require_programs() -> None:
    """Skip the test without Prometheus and Alertmanager."""
    for name in ("prometheus", "prometheus-alertmanager"):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed: scrapes and alerts are not proved")


def read_document(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the JSON document that a process prints first; the process continues."""
    text = ""
    assert process.stdout is not None
    for line in process.stdout:
        text += line
        if line.startswith("}"):
            break
    document: dict[str, Any] = json.loads(text)
    return document


@contextmanager
def start_monitor(root: Path, targets: list[str], sink: str) -> Iterator[subprocess.Popen[str]]:
    """Run the verb `monitor up` for the duration of a block, and stop it with SIGTERM."""
    ports = find_free_port(), find_free_port()
    overrides = [
        f"prometheus.port={ports[0]}",
        f"prometheus.alertmanager_port={ports[1]}",
        "prometheus.scrape_seconds=1",
        f"prometheus.targets={json.dumps(targets)}",
        f"prometheus.webhook={sink}",
        *(f"prometheus.alerts.{name}={value}" for name, value in THRESHOLDS.items()),
    ]
    command = [sys.executable, "-m", "regauge", "monitor", "up", str(root), *overrides, "--json"]
    log = root / "verb.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(os.environ)
        ) as process,
    ):
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MonitorSystem]:
    """Run the verb with Prometheus and Alertmanager; no run exports metrics yet."""
    require_programs()
    root = tmp_path_factory.mktemp("runs")
    dcgm, webhook, vocabulary = DcgmState(), Webhook(), Vocabulary()
    with ExitStack() as stack:
        pages = {
            "run": stack.enter_context(serve_page(vocabulary.render)),
            "incomplete": stack.enter_context(serve_page(render_incomplete_runs)),
            "dcgm": stack.enter_context(
                serve_page(lambda: render_dcgm(xid=dcgm.xid, drop=dcgm.drop))
            ),
            "old dcgm": stack.enter_context(
                serve_page(lambda: render_dcgm(is_old=True, xid=dcgm.xid))
            ),
            "others": stack.enter_context(serve_page(render_other_vendors)),
        }
        sink = stack.enter_context(answer_requests(webhook.respond, "webhook"))
        exporters = [pages[name].address for name in ("dcgm", "old dcgm", "others")]
        closed = f"127.0.0.1:{find_free_port()}"
        process = stack.enter_context(start_monitor(root, [*exporters, closed], sink))
        answer = read_document(process)
        yield MonitorSystem(root, answer["prometheus"], process, vocabulary, webhook, dcgm, pages)


@pytest.fixture
def jobs(runs: Runs) -> Iterator[Jobs]:
    """Return a factory of supervised runs."""
    jobs = Jobs(runs)
    yield jobs
    jobs.kill_all()
