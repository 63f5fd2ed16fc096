"""A local Prometheus with Alertmanager, whose targets are the runs in a folder.

A run that exports metrics writes its address to `exporters` in its output folder. These addresses
are the Prometheus targets. The servers listen on the loopback interface, and end with this process.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.monitoring.bundle import (
    ALERTMANAGER_FILE,
    PROMETHEUS_FILE,
    TARGETS_FILE,
    render_server_files,
    write_monitoring_files,
)
from regauge.monitoring.exporter import EXPORTERS, find_targets
from regauge.system import timing
from regauge.system.children import Child, spawn, stop_processes
from regauge.system.errors import PreflightError, SettingsError
from regauge.system.files import write_atomic
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from regauge.monitoring.prometheus_settings import Prometheus

MAX_DEPTH = 3
"""How many folder levels below the root to search for runs, such as pipeline stages."""
ALERTMANAGER_PROGRAMS = ("alertmanager", "prometheus-alertmanager")
"""Program names: the project's, and the Debian package's."""
HOST = "127.0.0.1"
START_SECONDS, REFRESH_SECONDS = 30.0, 2.0


@dataclass(frozen=True)
class MonitoringServers:
    folder: Path
    prometheus_url: str
    alertmanager_url: str | None
    """Alertmanager address; None if it is not installed."""
    children: tuple[Child, ...]

    def check_alive(self) -> None:
        """Raise PreflightError if a server has ended."""
        if any(child.poll() is not None for child in self.children):
            problem = "Prometheus or Alertmanager has ended"
            raise PreflightError(problem, f"read the logs in {self.folder}")


def find_programs() -> tuple[str, str | None]:
    """Return the paths to Prometheus and, if installed, Alertmanager.

    Raises PreflightError without Prometheus.
    """
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        remedy = "install it: apt-get install prometheus prometheus-alertmanager"
        raise PreflightError("'prometheus' is not installed here", remedy)
    return prometheus, next(filter(None, map(shutil.which, ALERTMANAGER_PROGRAMS)), None)


@contextmanager
def run_monitoring_servers(folder: Path, settings: Prometheus) -> Iterator[MonitoringServers]:
    """Run the servers for the duration of a block; their files and logs are in `folder`.

    Raises PreflightError without Prometheus, or if a server does not start, and SettingsError if a
    port is in use.
    """
    prometheus, alertmanager = find_programs()
    check_port(settings.port, "prometheus.port")
    if alertmanager is None:
        logger.warning("Alertmanager is not installed: alerts are shown, and not sent")
    else:
        check_port(settings.alertmanager_port, "prometheus.alertmanager_port")
    write_monitoring_files(folder, render_server_files(settings), overwrite=True)
    if not (folder / TARGETS_FILE).exists():
        write_targets(folder, [])
    commands = {
        "prometheus": [
            prometheus,
            f"--config.file={folder / PROMETHEUS_FILE}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--storage.tsdb.retention.time={settings.retention_days}d",
            f"--web.listen-address={HOST}:{settings.port}",
            "--log.level=warn",
        ]
    }
    if alertmanager is not None:
        commands["alertmanager"] = [
            alertmanager,
            f"--config.file={folder / ALERTMANAGER_FILE}",
            f"--storage.path={folder / 'alertmanager'}",
            f"--web.listen-address={HOST}:{settings.alertmanager_port}",
            "--cluster.listen-address=",
            "--log.level=warn",
        ]
    with ExitStack() as stack:
        children = [
            stack.enter_context(_run_server(words, folder / f"{name}.log"))
            for name, words in commands.items()
        ]
        servers = MonitoringServers(
            folder,
            f"http://{HOST}:{settings.port}",
            f"http://{HOST}:{settings.alertmanager_port}" if alertmanager else None,
            tuple(children),
        )
        for url in filter(None, (servers.prometheus_url, servers.alertmanager_url)):
            _wait_until_ready(servers, url)
        yield servers


def check_port(port: int, key: str) -> None:
    """Raise SettingsError if another program uses a port on the loopback interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            problem = f"port {port} is in use"
            raise SettingsError(problem, f"set another one: {key}={port + 1}") from None


@contextmanager
def _run_server(words: list[str], log: Path) -> Iterator[Child]:
    """Run a server in a block; it is stopped at the end, and killed if it does not stop."""
    log.unlink(missing_ok=True)
    child = spawn(words, log, {}, new_session=True)
    try:
        yield child
    finally:
        stop_processes([child])


def _wait_until_ready(servers: MonitoringServers, url: str) -> None:
    """Wait until a server answers; raises PreflightError if it ends, or does not answer."""
    is_ready = timing.wait_for(
        lambda: _is_ready(url),
        START_SECONDS,
        on_poll=servers.check_alive,
    )
    if not is_ready:
        problem = f"{url} does not answer after {START_SECONDS:g} s"
        raise PreflightError(problem, f"read the logs in {servers.folder}")


def _is_ready(url: str) -> bool:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=1)
    try:
        connection.request("GET", "/-/ready")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def find_scrape_targets(root: Path) -> list[dict[str, Any]]:
    """Return the targets for runs below a folder, in file_sd format.

    A target's `node` label is the name of its machine.
    """
    patterns = ("*/" * depth + EXPORTERS for depth in range(MAX_DEPTH + 1))
    folders = [path.parent for pattern in patterns for path in root.glob(pattern)]
    nodes = {target: node for folder in folders for target, node in find_targets(folder).items()}
    return [{"targets": [target], "labels": {"node": nodes[target]}} for target in sorted(nodes)]


def write_targets(folder: Path, targets: list[dict[str, Any]]) -> None:
    """Write the targets for Prometheus, which reads the file again when it changes."""
    write_atomic(folder / TARGETS_FILE, json.dumps(targets, indent=1) + "\n", durable=False)


def watch_runs(root: Path, servers: MonitoringServers) -> None:
    """Keep the targets equal to the runs below `root`, until a stop signal or a server's end."""
    targets: list[dict[str, Any]] = []
    while True:
        servers.check_alive()
        current = find_scrape_targets(root)
        if current != targets:
            write_targets(servers.folder, current)
            logger.info("%d targets", len(current))
            targets = current
        timing.wait_for(lambda: False, REFRESH_SECONDS)
