"""A real Prometheus on loopback, which scrapes the exporters of a folder."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from monitor.prometheus_queries import query
from regauge.system.processes import find_free_port

START_SECONDS = 60.0
CONFIGURATION = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 1s}}
rule_files: {rules}
scrape_configs:
  - job_name: regauge
    file_sd_configs: [{{files: ["{files}"], refresh_interval: 500ms}}]
"""


@dataclass
class Prometheus:
    """A running server."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query: `{"metric": labels, "value": [time, text]}`."""
        return query(self.url, expression)

    def values(self, expression: str, label: str = "rank") -> dict[str, float]:
        """Return the values of an instant query by a label."""
        return {
            series["metric"].get(label, ""): float(series["value"][1])
            for series in self.query(expression)
        }


@contextmanager
def start_prometheus(
    folder: Path, exporters: Path, rules: Sequence[str] = ()
) -> Iterator[Prometheus]:
    """Start a server that scrapes the exporters whose addresses are in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    configuration = folder / "prometheus.yml"
    configuration.write_text(CONFIGURATION.format(files=exporters / "*.json", rules=[*rules]))
    port = find_free_port()
    command = [
        "prometheus",
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_until(lambda: is_ready(server.url), START_SECONDS, lambda: log_of(folder))
        yield server
    finally:
        process.terminate()
        process.wait()


def log_of(folder: Path) -> str:
    """Return the log of a server."""
    return (folder / "log.txt").read_text()


def is_ready(url: str) -> bool:
    """Return whether a server answers queries."""
    try:
        return httpx.get(f"{url}/-/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until(
    condition: Callable[[], object], seconds: float, describe: Callable[[], object] = str
) -> None:
    """Poll a condition until it is true; fail with a description after some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.05)
