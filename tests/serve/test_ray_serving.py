"""Replicas of the server on a real Ray cluster of two nodes, and on a Ray of the command."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import faults
from faults.families import list_descendants
from regauge.config import build
from regauge.serving.api_keys import VARIABLE, ApiKeys
from regauge.serving.ray_cluster import ray_serving
from regauge.serving.ray_cluster.ray_serving import _check_resources, _convert_error
from regauge.serving.ray_cluster.ray_settings import RayServing
from regauge.system.errors import DataError, PreflightError, SettingsError, TransientError
from serve.servers import (
    PATIENT,
    STOP_SECONDS,
    ServerProcess,
    copy_artifact,
    draw_texts,
    encoder,
    is_running,
    run_server,
    start_server,
    update_manifest,
    wait_for,
)

__all__ = ["encoder"]

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None or find_spec("watchfiles") is None,
    reason="no Ray Serve here (ray[serve]): replicas on Ray are not proved",
)
CLUSTER = Path(faults.__path__[0]) / "ray_cluster.py"
RAY_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
KEY = "a-key-of-the-test"
HEADERS = {"Authorization": f"Bearer {KEY}"}
REPLICA = b"ray::ServeReplica:regauge"
CLIENTS = 4
REPLACE_SECONDS = 240.0
"""Time in which Ray replaces a replica; the machine may be busy."""
EXACT = ("serve.batch_invariant=true",)
"""An answer has the same bits in every batch, and so on every replica."""


@dataclass(frozen=True)
class RayNodes:
    """The processes of a cluster."""

    address: str
    pid: int

    def list_commands(self) -> dict[int, bytes]:
        """Return the command lines of its processes, by process id."""
        commands = {}
        for pid in list_descendants(self.pid):
            try:
                commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
        return commands

    def list_replicas(self) -> list[int]:
        """Return the processes of the replicas."""
        return [pid for pid, line in self.list_commands().items() if line.startswith(REPLICA)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    """Return a cluster of two nodes with a CPU each."""
    with subprocess.Popen(
        [sys.executable, str(CLUSTER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **RAY_VARIABLES},
    ) as process:
        assert process.stdout is not None
        nodes = RayNodes(process.stdout.readline().strip(), process.pid)
        descendants = list_descendants(process.pid)
        yield nodes
        process.communicate(timeout=STOP_SECONDS)
    wait_for(lambda: not any(map(is_running, descendants)))


@dataclass
class Load:
    """Clients that send texts until they are stopped, and retry a request that fails."""

    url: str
    texts: list[str]
    expected: np.ndarray  # [texts, width]
    is_stopped: threading.Event = field(default_factory=threading.Event)
    losses: list[str] = field(default_factory=list)
    replicas: set[str] = field(default_factory=set)

    def run(self, condition: Callable[[], bool], act: Callable[[], None] | None = None) -> None:
        """Send texts until a condition holds; `act` runs meanwhile."""
        with ThreadPoolExecutor(CLIENTS) as executor:
            futures = [executor.submit(self._run_client, index) for index in range(CLIENTS)]
            try:
                if act is not None:
                    act()
                wait_for(condition, REPLACE_SECONDS)
            finally:
                self.is_stopped.set()
            for future in futures:
                future.result()

    def _run_client(self, offset: int) -> None:
        """Send one text after the other; the last one is answered as well."""
        with httpx.Client(base_url=self.url, headers=HEADERS, timeout=120) as client:
            index = offset
            while not self.is_stopped.is_set():
                index = (index + CLIENTS) % len(self.texts)
                while (vector := self._request(client, self.texts[index])) is None:
                    pass
                np.testing.assert_array_equal(vector, self.expected[index])

    def _request(self, client: httpx.Client, text: str) -> np.ndarray | None:
        """Return the vector of a text, or None if the request was lost."""
        try:
            response = client.post("/embed", json={"inputs": text})
        except httpx.TransportError as error:
            self.losses.append(repr(error))
            return None
        if response.status_code != 200:
            self.losses.append(f"{response.status_code} {response.text}")
            return None
        self.replicas.add(response.headers["Regauge-Replica"])
        return np.array(response.json()[0], np.float32)


@needs_ray
@pytest.mark.full
def test_replicas_answer_as_the_plain_server_and_leave_nothing(
    encoder: Path, tmp_path: Path
) -> None:
    texts = draw_texts(32)
    with start_server(tmp_path / "plain", f"model={encoder}", *EXACT) as plain:
        expected = plain.embed(texts)
    tables = ("serve.workers.ray.replicas=2", "serve.workers.ray.route_prefix=/models")
    variables = {**RAY_VARIABLES, VARIABLE: KEY}
    with start_server(
        tmp_path / "ray", f"model={encoder}", *tables, *EXACT, PATIENT, environment=variables
    ) as server:
        assert server.address.endswith("/models")
        assert server.health()["workers"] == 1
        assert server.post("/embed", {"inputs": texts}).status_code == 401
        np.testing.assert_array_equal(server.embed(texts, headers=HEADERS), expected)
        load = Load(server.address, texts, expected)
        load.run(lambda: len(load.replicas) == 2)
        assert load.losses == []
        processes = list_descendants(server.process.pid)
        check_drain(server, texts, expected)
    wait_for(lambda: not any(map(is_running, processes)))


@needs_ray
@pytest.mark.full
def test_a_killed_replica_is_replaced_and_loses_only_requests_in_flight(
    cluster: RayNodes, encoder: Path, tmp_path: Path
) -> None:
    texts = draw_texts(32)
    tables = (f"serve.workers.ray.address={cluster.address}", "serve.workers.ray.replicas=2")
    arguments = (f"model={encoder}", *tables, *EXACT, PATIENT)
    with start_server(tmp_path / "ray", *arguments, environment=RAY_VARIABLES) as server:
        load = Load(server.address, texts, server.embed(texts))

        def kill_replica() -> None:
            wait_for(lambda: len(load.replicas) == 2)
            os.kill(cluster.list_replicas()[0], signal.SIGKILL)

        load.run(lambda: len(load.replicas) == 3, kill_replica)
        assert len(load.losses) <= CLIENTS, load.losses
        check_used_names(tmp_path, arguments)
        check_drain(server, texts, load.expected)
    commands = cluster.list_commands().values()
    assert not [line for line in commands if line.startswith(b"ray::Serve")]
    assert not [line for line in commands if b"worker_main" in line]


def check_used_names(folder: Path, arguments: tuple[str, ...]) -> None:
    """Check the errors of a second command on the cluster, which change nothing there."""
    code, log = run_server(folder / "name", *arguments, environment=RAY_VARIABLES)
    assert code == SettingsError.exit_code
    assert "an application called 'regauge' is already running on the cluster; set" in log
    other = (*arguments, "serve.workers.ray.name=other")
    code, log = run_server(folder / "route", *other, environment=RAY_VARIABLES)
    assert code == SettingsError.exit_code
    assert "the route '/' is used by another application; set" in log


def check_drain(server: ServerProcess, texts: list[str], expected: np.ndarray) -> None:
    """Stop the replicas under load: each request is answered, until the route is gone."""
    begun = threading.Event()

    def send(offset: int) -> int:
        with httpx.Client(base_url=server.address, headers=HEADERS, timeout=120) as client:
            for index in itertools.cycle(range(offset, len(texts), CLIENTS)):
                response = client.post("/embed", json={"inputs": texts[index]})
                if response.status_code != 200:
                    break
                vector = np.array(response.json()[0], np.float32)
                np.testing.assert_array_equal(vector, expected[index])
                begun.set()
        return response.status_code

    with ThreadPoolExecutor(CLIENTS) as executor:
        futures = [executor.submit(send, index) for index in range(CLIENTS)]
        assert begun.wait(60)
        assert server.stop() == 0, server.log
        assert [future.result() for future in futures] == [404] * CLIENTS


@needs_ray
@pytest.mark.full
def test_a_replica_that_refuses_its_artifact_ends_the_command(
    cluster: RayNodes, encoder: Path, tmp_path: Path
) -> None:
    damaged = copy_artifact(encoder, tmp_path / "damaged")
    weights = next(damaged.rglob("*.safetensors"))
    tensors = load_file(weights)
    save_file({name: torch.zeros_like(value) for name, value in tensors.items()}, weights)
    update_manifest(damaged)
    arguments = (f"model={damaged}", f"serve.workers.ray.address={cluster.address}")
    code, log = run_server(tmp_path / "run", *arguments, environment=RAY_VARIABLES)
    assert code == DataError.exit_code, log
    assert "a replica failed to start: row 0 of parity_rows.json" in log, log
    assert log.rstrip().endswith("; export the artifact again on this machine")
    assert cluster.list_replicas() == []
    assert "Traceback" not in log


@needs_ray
def test_an_unreachable_cluster_is_one_line(encoder: Path, tmp_path: Path) -> None:
    arguments = (f"model={encoder}", "serve.workers.ray.address=127.0.0.1:1")
    code, log = run_server(tmp_path / "run", *arguments, environment=RAY_VARIABLES)
    assert code == TransientError.exit_code, log
    assert "the Ray cluster at '127.0.0.1:1' cannot be reached: " in log
    assert "Traceback" not in log


def test_without_ray_the_command_names_the_package(encoder: Path, tmp_path: Path) -> None:
    package = tmp_path / "packages" / "ray"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError(\"No module named 'ray'\")\n")
    source = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    arguments = (f"model={encoder}", "serve.workers.ray.replicas=2")
    code, log = run_server(tmp_path / "run", *arguments, environment={"PYTHONPATH": source})
    assert code == PreflightError.exit_code, log
    assert "needs Ray Serve: No module named 'ray'; install it: pip install" in log


def test_replicas_need_the_resources_of_their_machine() -> None:
    options = RayServing(replicas=3)
    _check_resources({"CPU": 3.0}, options)
    with pytest.raises(SettingsError, match="3 replicas need 3 CPU, and Ray has 2"):
        _check_resources({"CPU": 2.0}, options)
    _check_resources({"CPU": 2.0}, RayServing(address="auto", replicas=3))
    with pytest.raises(SettingsError, match="max_replicas is smaller than replicas = 3"):
        build(RayServing, {"replicas": 3, "max_replicas": 2})


def test_the_error_of_a_replica_keeps_its_problem_and_remedy() -> None:
    cause = "".join(traceback.format_exception_only(DataError("row 0 differs", "export it again")))
    error = _convert_error(f"The deployment failed:\n{cause}  at replica 3", RayServing())
    assert isinstance(error, DataError)
    assert str(error) == "a replica failed to start: row 0 differs; export it again"


def test_the_command_warns_of_changed_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The replicas keep the keys of the start; one change is reported once."""
    path = tmp_path / "keys.txt"
    path.write_text("old")
    keys = ApiKeys.read(str(path))
    signals = iter([None, None, None, signal.SIGTERM])
    monkeypatch.setattr(ray_serving.stop_signals, "find_signal", lambda: next(signals))
    monkeypatch.setattr(ray_serving, "_read_state", lambda *_: "RUNNING")
    monkeypatch.setattr(ray_serving, "WATCH_SECONDS", 0)
    path.write_text("new one")
    ray_serving._wait_until_stopped(None, RayServing(), keys)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "keep the earlier API keys" in caplog.text
