"""Runs of several nodes, which are commands on this machine, and an etcd for them to meet at."""

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
from faults.families import descendants
from regauge.config import merge
from regauge.processes import free_port

ETCD_SECONDS = 30.0
LATE_SECONDS = 60.0


@contextmanager
def etcd(root: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield where an etcd is that speaks the second version of its protocol, and its process."""
    binary = shutil.which("etcd")
    if binary is None:
        pytest.skip("no etcd here (Debian's etcd-server): rows 13 and 43 are not proved")
    own, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    command = [binary, "--enable-v2", "--data-dir", str(root), "--initial-cluster"]
    command += [f"default={peer}", "--initial-advertise-peer-urls", peer]
    command += ["--listen-peer-urls", peer, "--listen-client-urls", own]
    command += ["--advertise-client-urls", own]
    with (root.parent / "etcd.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _healthy(own.removeprefix("http://"), process)
        yield own.removeprefix("http://"), process
    finally:
        process.kill()
        process.wait()


def asked(endpoint: str, path: str) -> bytes:
    """Return what an HTTP server answers."""
    with closing(HTTPConnection(endpoint, timeout=5)) as connection:
        connection.request("GET", path)
        return connection.getresponse().read()


def _healthy(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + ETCD_SECONDS
    while time.monotonic() < until:
        assert process.poll() is None, "etcd has ended"
        try:
            if b"true" in asked(endpoint, "/health"):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("etcd does not answer")


@dataclass
class Cluster:
    """Nodes of one run; each is a command with the same run file."""

    jobs: Jobs
    endpoint: str
    kind: str = "c10d"
    place: subprocess.Popen[bytes] | None = None
    """What keeps the meeting place, where no node does."""
    job: Job | None = None
    nodes: list[Job] = field(default_factory=list)

    def run(self, count: str, *faults: dict[str, Any], **changes: Any) -> Job:
        """Say which run the nodes have; nothing is started yet."""
        nodes = {
            "count": count,
            "rendezvous": self.kind,
            "endpoint": self.endpoint,
            "join_seconds": 40.0,
            "last_call_seconds": 4.0,
        }
        own = merge({"execution": {"nodes": nodes}}, changes)
        self.job = self.jobs.job(*faults, size=1, **own)
        return self.job

    def start(self, **changes: Any) -> Job:
        """Start one more node."""
        assert self.job is not None
        node = replace(self.job, **changes).start()
        self.jobs.made.append(node)
        self.nodes.append(node)
        return node

    def end(self) -> list[int]:
        """Wait for all nodes; return their codes."""
        return [node.wait().code for node in self.nodes]


def lose(*nodes: Job, whole: bool = True) -> None:
    """Kill nodes' commands, and their processes at the same moment where they are lost whole."""
    commands = [node.process for node in nodes if node.process is not None]
    own = [pid for command in commands for pid in descendants(command.pid)]
    for pid in [*(command.pid for command in commands), *(own if whole else ())]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for command in commands:
        command.communicate()
    until = time.monotonic() + LATE_SECONDS
    while any(_alive(pid) for pid in own):
        assert time.monotonic() < until, "its processes outlive it"
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def stranger() -> Iterator[str]:
    """Yield an address where somebody listens who knows nothing of a rendezvous."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"
