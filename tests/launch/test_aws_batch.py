"""Jobs on the simulator of AWS Batch: the processes are those of the submitted requests."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed import datasets
from distributed.runs import settings
from distributed.test_resume import assert_same
from launch.batch_simulator import BatchSimulator, SimulatedJob, start_simulator
from regauge.config import dump, merge
from regauge.processes import find_free_port

SECONDS = 120.0
STEPS = 200
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/regauge:0.1.0"
LAUNCH: dict[str, Any] = {
    "instance": "c7i.4xlarge",
    "image": IMAGE,
    "target": [{"kind": "aws-batch", "queue": "regauge"}],
}
TRAINING: dict[str, Any] = {
    "stop": {"steps": STEPS},
    "output": {"checkpoint": {"every_steps": 10, "keep_last": 3}},
    "execution": {
        "processes": 1,
        "nodes": {"count": 2, "join_seconds": 60.0, "last_call_seconds": 4.0},
        "supervision": {"preflight": "brief"},
        "timeout_seconds": 60,
    },
}


@pytest.fixture
def simulator(tmp_path: Path) -> Iterator[BatchSimulator]:
    """Return a simulator; its containers have `workspace` as /workspace, and see `data`."""
    for name in ("workspace", "data"):
        (tmp_path / name).mkdir()
    with start_simulator(tmp_path, {"/workspace": tmp_path / "workspace"}) as simulator:
        yield simulator


def call(*arguments: str, code: int = 0) -> str:
    """Run a command of Regauge; return its standard output, or its last error line."""
    command = [sys.executable, "-m", "regauge", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == code, process.stdout + process.stderr
    return process.stdout if code == 0 else process.stderr.splitlines()[-1]


def write_run_file(root: Path, **changes: Any) -> Path:
    """Write a training run and its dataset into the folders of the containers."""
    data = root / "data"
    packed = datasets.write_packed(data / "packed")
    tables = settings(data / "out", packed, "mlm", **merge(TRAINING, changes))
    launch = LAUNCH | {
        "environment": {"MASTER_PORT": str(find_free_port())},
        "volumes": [{"name": "data", "mount": str(data), "kind": "host", "source": str(data)}],
    }
    path = root / "workspace" / "run.json"
    path.write_text(json.dumps(dump(tables) | {"launch": launch}))
    return path


def submit(path: Path, verb: str, *overrides: str) -> str:
    """Submit a verb of a run file; return the handle."""
    output = call("launch", str(path), verb, *overrides, "--on", "aws_batch", "-o", "json")
    return str(json.loads(output)["handle"])


def find_job(simulator: BatchSimulator, handle: str) -> SimulatedJob:
    """Return the job of a handle."""
    return simulator.jobs[handle.rpartition("/")[2]]


def read_status(handle: str) -> dict[str, Any]:
    """Return what `job status --why` prints."""
    document: dict[str, Any] = json.loads(call("job", "status", handle, "--why", "--json"))
    return document


def wait_until(job: SimulatedJob, condition: Callable[[], bool], problem: str) -> None:
    """Wait for a condition while a job has not failed."""
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, problem
        assert job.status != "FAILED", f"{problem}: {job.attempts}"
        time.sleep(0.05)


def count_steps(folder: Path) -> int:
    """Return the last step in the metrics of a run."""
    path = folder / "metrics.jsonl"
    texts = path.read_text().splitlines() if path.exists() else []
    steps = [json.loads(text)["step"] for text in texts if text.endswith("}")]
    return max(steps, default=0)


def train_undisturbed(root: Path, path: Path) -> Path:
    """Run the same training with two processes on one node; return its folder."""
    folder = root / "undisturbed"
    tables = json.loads(path.read_text())
    del tables["launch"]
    tables["execution"] |= {"processes": 2, "nodes": {}}
    tables["output"]["folder"] = str(folder)
    run_file = root / "undisturbed.json"
    run_file.write_text(json.dumps(tables))
    call("train", str(run_file))
    return folder


@pytest.mark.parametrize("lost", [1, 0], ids=["child", "main"])
def test_a_training_that_loses_a_node_equals_the_undisturbed_run(
    simulator: BatchSimulator, tmp_path: Path, lost: int, figure: Callable[[str, float], None]
) -> None:
    path = write_run_file(tmp_path)
    handle = submit(path, "train")
    job, output = find_job(simulator, handle), tmp_path / "data" / "out"
    wait_until(job, lambda: count_steps(output) >= 40, "the run does not start")
    status = read_status(handle)
    assert status["state"] == "running"
    assert status["attempt"] == 1
    step, lost_at = count_steps(output), time.monotonic()
    simulator.reclaim(job.nodes[lost])
    wait_until(job, lambda: bool(job.attempts), "the main node does not end")
    wait_until(job, lambda: count_steps(output) > step, "the run does not resume")
    figure("seconds from the loss of a Batch node to the next step", time.monotonic() - lost_at)
    assert json.loads(call("job", "wait", handle, "--json"))["state"] == "succeeded"
    attempts = [attempt["container"].get("exitCode") for attempt in job.attempts]
    assert attempts == [75 if lost else None, 0]
    status = read_status(handle)
    assert (status["attempt"], status["exit_code"]) == (2, 0)
    assert [node["state"] for node in status["nodes"]] == ["succeeded", "succeeded"]
    assert_same(train_undisturbed(tmp_path, path), output)
