"""A real Prometheus on loopback, which scrapes the exporters of a folder."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regauge.processes import find_free_port

START_SECONDS = 60.0
CONFIGURATION = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
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
        query = urllib.parse.urlencode({"query": expression})
        url = f"{self.url}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 (loopback)
            document = json.load(answer)
        assert document["status"] == "success", document
        result: list[dict[str, Any]] = document["data"]["result"]
        return result

    def values(self, expression: str, label: str = "rank") -> dict[str, float]:
        """Return the values of an instant query by a label."""
        return {
            series["metric"].get(label, ""): float(series["value"][1])
            for series in self.query(expression)
        }


@contextmanager
def start_prometheus(folder: Path, exporters: Path) -> Iterator[Prometheus]:
    """Start a server that scrapes the exporters whose addresses are in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    configuration = folder / "prometheus.yml"
    configuration.write_text(CONFIGURATION.format(files=exporters / "*.json"))
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
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as answer:  # noqa: S310 (loopback)
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_until(
    condition: Callable[[], object], seconds: float, describe: Callable[[], object] = str
) -> None:
    """Poll a condition until it is true; fail with a description after some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.05)
