"""Jobs on a Ray cluster of two nodes, which loses a worker, a node, or its launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from distributed.conftest import runs, worlds
from distributed.runs import Runs, settings
from distributed.test_resume import assert_same
from end_to_end.predicting import export_run, read_output_files, train_model, write_row_groups
from faults.families import list_descendants
from launch.ray_cluster import LoopbackCluster, kill_node, start_cluster
from launch.training_jobs import count_steps, wait_until
from regauge.config import dump, merge
from regauge.system.processes import inspect_process
from regauge.system.timing import wait_for

__all__ = ["runs", "worlds"]
WAIT_SECONDS = 300.0
STEPS = 300
RUN: dict[str, Any] = {
    "stop": {"steps": STEPS},
    "output": {"checkpoint": {"every_steps": 20, "keep_last": 3}},
    "execution": {
        "compile": "off",
        "timeout_seconds": 60,
        "supervision": {"hang_timeout_seconds": 5.0, "preflight": "brief"},
    },
}
NODES = {"count": "2", "join_seconds": 60.0}

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None or find_spec("opencensus") is None,
    reason="no Ray with its dashboard here (ray[default]): jobs of Ray are not proved",
)
pytestmark = needs_ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[LoopbackCluster]:
    """Return a cluster of a head node and a worker node."""
    with start_cluster() as cluster:
        yield cluster


def regauge(*arguments: str, code: int = 0) -> str:
    """Run a command, check its exit code, and return its standard output."""
    command = [sys.executable, "-m", "regauge", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == code, process.stderr
    return process.stdout if code == 0 else process.stderr


def read_status(handle: str) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(regauge("job", "status", handle, "--why", "--json"))
    return status


def wait_for_status(
    handle: str, is_reached: Callable[[dict[str, Any]], bool], *, may_fail: bool = False
) -> dict[str, Any]:
    until = time.monotonic() + WAIT_SECONDS
    while not is_reached(status := read_status(handle)):
        assert time.monotonic() < until, status
        has_failed = status["state"] in ("failed", "cancelled")
        assert may_fail or not has_failed, regauge("job", "logs", handle)
    return status


def wait_for_state(handle: str, *states: str, may_fail: bool = False) -> dict[str, Any]:
    return wait_for_status(handle, lambda status: status["state"] in states, may_fail=may_fail)


def write_job(path: Path, cluster: LoopbackCluster, tables: dict[str, Any]) -> Path:
    """Write a run file with a [launch] table for a cluster."""
    target = {"kind": "ray", "address": cluster.dashboard, "grace_seconds": 30.0}
    launch = {"name": path.stem, "target": [target], "labels": {"team": "search"}}
    path.write_text(json.dumps({**tables, "launch": launch}))
    return path


def submit(run_file: Path, verb: str) -> str:
    """Launch a verb in a process that has ended when this returns; return the handle."""
    answer = json.loads(regauge("launch", str(run_file), verb, "--on", "ray", "--json"))
    return str(answer["handle"])


def wait_for_step(folder: Path, step: int) -> None:
    wait_until(lambda: count_steps(folder) >= step, f"step {step}")


def count_hosts(handle: str) -> int:
    return len({node["host"] for node in read_status(handle)["nodes"]})


def build_training(runs: Runs, folder: Path) -> dict[str, Any]:
    """Return the tables of a run of two nodes with one process each."""
    changes = merge(RUN, {"execution": {"processes": 1, "nodes": NODES}})
    return dump(settings(folder, runs.data["packed"], "mlm", **changes))


def test_a_training_that_loses_a_node_equals_the_undisturbed_run(
    runs: Runs, cluster: LoopbackCluster, tmp_path: Path, figure: Callable[[str, float], None]
) -> None:
    folder = tmp_path / "out"
    run_file = write_job(tmp_path / "lost-node.json", cluster, build_training(runs, folder))
    handle = submit(run_file, "train")
    assert handle == f"ray://{cluster.dashboard}/lost-node"
    assert wait_for_state(handle, "running")["attempt"] == 1
    wait_until(lambda: count_hosts(handle) == 2, "two nodes")
    wait_for_step(folder, 30)
    kill_node(cluster.nodes[1])
    lost_at, step = time.monotonic(), count_steps(folder)
    wait_for_state(handle, "restarting", "starting")
    cluster.start_worker()
    wait_for_state(handle, "running")
    wait_for_step(folder, step + 10)
    figure("Ray: seconds from the loss of a node to the next new step", time.monotonic() - lost_at)
    status = wait_for_state(handle, "succeeded")
    assert (status["attempt"], status["exit_code"]) == (2, 0)
    assert_same(runs.train_once(2, "mlm", **RUN), folder)
    messages = [
        event["message"]
        for event in json.loads(regauge("job", "events", handle, "--json"))["events"]
    ]
    assert any("was lost" in message for message in messages), messages
    assert f"output: {folder}" in regauge("job", "logs", handle)
    first = regauge("job", "logs", handle, "--attempt", "1")
    assert "attempt 1 on 2 nodes" in first
    assert f"output: {folder}" not in first


@pytest.mark.parametrize(
    "variables",
    [{}, {"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong"}],
    ids=["no mode", "no token", "a wrong token"],
)
def test_a_client_without_the_token_is_refused_in_one_line(
    cluster: LoopbackCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # it has no token
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    problem = regauge("job", "status", f"ray://{cluster.dashboard}/any", code=2)
    assert problem.count("\n") == 1, problem
    assert f"the Ray cluster at {cluster.dashboard} needs a token" in problem
    assert problem.endswith(
        "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the token of the cluster\n"
    )


def test_a_killed_actor_takes_its_command_with_it_and_a_cancelled_job_saves(
    runs: Runs, cluster: LoopbackCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    tables = merge(build_training(runs, folder), {"stop": {"steps": 100_000}})
    handle = submit(write_job(tmp_path / "cancel.json", cluster, tables), "train")
    wait_for_step(folder, 25)
    actor = list_commands("NodeActor")[0]
    commands = list_descendants(actor)
    assert commands
    os.kill(actor, signal.SIGKILL)
    # All nodes are there, so a poll may miss the state "restarting".
    wait_for_status(handle, lambda status: status["attempt"] >= 2)
    # A busy machine may need seconds to remove killed processes; others wait a minute for nodes.
    assert wait_for(lambda: not any(map(is_alive, commands)), 5.0, poll_seconds=0.05)
    wait_for_state(handle, "running")
    step = count_steps(folder)
    wait_for_step(folder, step + 5)
    assert "stop it first" in regauge("job", "cleanup", handle, code=2)
    assert "has a job 'cancel' already" in regauge(
        "launch", str(tmp_path / "cancel.json"), "train", "--on", "ray", code=2
    )
    answer = json.loads(regauge("job", "cancel", handle, "--json"))
    assert answer["state"] == "cancelled"
    assert "has ended already (cancelled)" in regauge("job", "cancel", handle, code=2)
    assert "143" in regauge("job", "logs", handle) or list((folder / "checkpoints").iterdir())
    assert not list_commands(str(folder.parent))
    assert json.loads(regauge("job", "cleanup", handle, "--json")) == {"leftovers": []}
    assert "has no job 'cancel'" in regauge("job", "status", handle, code=2)


def is_alive(pid: int) -> bool:
    return inspect_process(pid).state not in ("", "Z")


def list_commands(text: str) -> list[int]:
    """Return the processes with a text in their command line."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if text.encode() in command and int(path.parent.name) != os.getpid():
            pids.append(int(path.parent.name))
    return pids


def list_workers() -> list[int]:
    """Return the processes of `predict`, which Ray names after their class."""
    return list_commands("PieceWorker")


def test_a_prediction_that_loses_a_worker_has_the_same_output(
    cluster: LoopbackCluster, tmp_path: Path
) -> None:
    artifact = export_run(train_model(tmp_path), tmp_path / "artifact")
    source = write_row_groups(tmp_path / "texts.parquet", 6, 400)
    tables = {
        "artifact": str(artifact),
        "source": {"kind": "parquet", "files": [str(source)]},
        "predict": {"shard_records": 100},
        "output": {"folder": str(tmp_path / "out")},
    }
    run_file = write_job(tmp_path / "embed.json", cluster, tables)
    alone = tmp_path / "alone"
    regauge("predict", str(run_file), f"output.folder={alone}", "execution.executor=inline")
    handle = submit(run_file, "predict")
    wait_until(lambda: bool(list_workers()), "the first worker")
    os.kill(list_workers()[0], signal.SIGKILL)
    wait_for_state(handle, "succeeded")
    assert read_output_files(tmp_path / "out") == read_output_files(alone)


def test_a_command_that_fails_is_reported_with_its_code(
    runs: Runs, cluster: LoopbackCluster, tmp_path: Path
) -> None:
    tables = merge(build_training(runs, tmp_path / "out"), {"data": {"path": "/no/data"}})
    handle = submit(write_job(tmp_path / "no-data.json", cluster, tables), "train")
    status = wait_for_state(handle, "failed", may_fail=True)
    assert (status["state"], status["exit_code"], status["attempt"]) == ("failed", 64, 1)
    assert "/no/data" in regauge("job", "logs", handle)
    assert "job logs" in regauge("job", "wait", handle, code=64)
