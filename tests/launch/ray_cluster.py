"""A Ray cluster on loopback: a head node and worker nodes, each a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from faults.families import list_descendants
from regauge.system.processes import find_free_port
from regauge.system.timing import wait_for

START_SECONDS = 300.0
TOKEN = uuid.uuid4().hex
"""Token of the cluster and its clients. A token in the home folder would be used otherwise."""
STORE_BYTES = 100 * 2**20
COMMAND = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]


@dataclass
class LoopbackCluster:
    """The processes of a cluster, with the addresses of its head node."""

    folder: Path
    cpus: int
    gcs: str = field(default_factory=lambda: f"127.0.0.2:{find_free_port()}")
    dashboard: str = field(default_factory=lambda: f"127.0.0.1:{find_free_port()}")
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_head(self) -> None:
        """Start the head node, and wait until its job server answers."""
        port, dashboard_port = self.gcs.partition(":")[2], self.dashboard.partition(":")[2]
        self._start(
            *("--head", f"--port={port}", f"--dashboard-port={dashboard_port}"),
            *("--dashboard-host=127.0.0.1", f"--temp-dir={self.folder}"),
            f"--ray-client-server-port={find_free_port()}",
        )
        self._wait_until(lambda: self._read("/api/jobs/") is not None, "its job server")
        self._wait_until(lambda: "127.0.0.2" in self.list_hosts(), "the head node")

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Start a worker node, and wait until the cluster has it."""
        process = self._start(f"--address={self.gcs}")
        host = f"127.0.0.{len(self.nodes) + 1}"
        self._wait_until(lambda: host in self.list_hosts(), "a worker node")
        return process

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        ports = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port")
        command = [*COMMAND, f"--num-cpus={self.cpus}", f"--object-store-memory={STORE_BYTES}"]
        command += [f"--{name}={find_free_port()}" for name in ports]
        # Ray replaces 127.0.0.1 by an address of the network, but no other loopback address.
        command += [f"--node-ip-address=127.0.0.{len(self.nodes) + 2}", *options]
        with (self.folder / f"node-{len(self.nodes)}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self.nodes.append(process)
        return process

    def list_hosts(self) -> list[str]:
        """Return the addresses of the nodes that are alive."""
        document = json.loads(self._read("/nodes?view=summary") or "{}")
        nodes = document.get("data", {}).get("summary", [])
        alive = (node for node in nodes if node.get("raylet", {}).get("state") == "ALIVE")
        return [str(node.get("ip")) for node in alive]

    def _read(self, path: str) -> bytes | None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        request = Request(f"http://{self.dashboard}{path}", headers=headers)
        with suppress(OSError), urlopen(request, timeout=10) as answer:  # noqa: S310 - loopback
            return bytes(answer.read())
        return None

    def _wait_until(self, condition: Callable[[], bool], name: str) -> None:
        def check_node() -> None:
            assert self.nodes[-1].poll() is None, f"{name} has ended: {self.read_logs()}"

        has_started = wait_for(condition, START_SECONDS, poll_seconds=0.2, on_poll=check_node)
        assert has_started, f"{name} did not start: {self.read_logs()}"

    def read_logs(self) -> str:
        logs = sorted(self.folder.glob("node-*.log"))
        return "\n".join(path.read_text(errors="replace") for path in logs)


def kill_node(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a node at once, as the loss of its machine does."""
    for pid in [process.pid, *list_descendants(process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@contextmanager
def start_cluster(cpus: int = 2, workers: int = 1) -> Iterator[LoopbackCluster]:
    """Yield a cluster of a head node and some worker nodes, whose clients need a token."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    cluster = LoopbackCluster(folder, cpus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        try:
            cluster.start_head()
            for _ in range(workers):
                cluster.start_worker()
            yield cluster
        finally:
            for process in reversed(cluster.nodes):
                kill_node(process)
            shutil.rmtree(folder, ignore_errors=True)
