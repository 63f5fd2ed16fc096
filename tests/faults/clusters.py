"""Runs of several nodes as commands on this machine, and an etcd for their rendezvous."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from faults.conftest import Job, Jobs
from faults.families import list_descendants
from regauge.config import merge
from regauge.system.processes import find_free_port

ETCD_SECONDS = 30.0
LATE_SECONDS = 60.0


@contextmanager
def start_etcd(root: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the endpoint and the process of an etcd with version 2 of its protocol."""
    binary = shutil.which("etcd")
    if binary is None:
        pytest.skip("no etcd here (Debian's etcd-server): rows 13 and 43 are not proved")
    client, peer = (f"http://127.0.0.1:{find_free_port()}" for _ in range(2))
    command = [binary, "--enable-v2", "--data-dir", str(root), "--initial-cluster"]
    command += [f"default={peer}", "--initial-advertise-peer-urls", peer]
    command += ["--listen-peer-urls", peer, "--listen-client-urls", client]
    command += ["--advertise-client-urls", client]
    with (root.parent / "etcd.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_until_healthy(client.removeprefix("http://"), process)
        yield client.removeprefix("http://"), process
    finally:
        process.kill()
        process.wait()


def request(endpoint: str, path: str) -> bytes:
    """Return the answer of an HTTP server to a GET request."""
    with closing(HTTPConnection(endpoint, timeout=5)) as connection:
        connection.request("GET", path)
        return connection.getresponse().read()


def _wait_until_healthy(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + ETCD_SECONDS
    while time.monotonic() < until:
        assert process.poll() is None, "etcd has ended"
        try:
            if b"true" in request(endpoint, "/health"):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("etcd does not answer")


@dataclass
class Cluster:
    """The nodes of one run; each is a command with the same run file."""

    jobs: Jobs
    endpoint: str
    backend: str = "c10d"
    etcd_process: subprocess.Popen[bytes] | None = None
    """The process that serves the rendezvous, if no node does."""
    job: Job | None = None
    nodes: list[Job] = field(default_factory=list)

    def create_job(self, count: str, *faults: dict[str, Any], **changes: Any) -> Job:
        """Create the run of the nodes; nothing is started yet."""
        nodes = {
            "count": count,
            "rendezvous": self.backend,
            "endpoint": self.endpoint,
            "join_seconds": 40.0,
        }
        merged = merge({"execution": {"nodes": nodes}}, changes)
        self.job = self.jobs.create(*faults, size=1, **merged)
        return self.job

    def start_node(self, **changes: Any) -> Job:
        """Start one more node."""
        assert self.job is not None
        node = replace(self.job, **changes).start()
        self.jobs.created.append(node)
        self.nodes.append(node)
        return node

    def wait_for_nodes(self) -> list[int]:
        """Wait for all nodes; return their exit codes."""
        return [node.wait().code for node in self.nodes]


def kill_nodes(*nodes: Job, with_processes: bool = True) -> None:
    """Kill the commands of nodes, by default with their processes at the same moment."""
    commands = [node.process for node in nodes if node.process is not None]
    children = [pid for command in commands for pid in list_descendants(command.pid)]
    for pid in [*(command.pid for command in commands), *(children if with_processes else ())]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for command in commands:
        command.communicate()
    until = time.monotonic() + LATE_SECONDS
    while any(_is_alive(pid) for pid in children):
        assert time.monotonic() < until, "the processes of a node outlive its command"
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def serve_unrelated_port() -> Iterator[str]:
    """Yield an address at which a server listens that is no rendezvous."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"
