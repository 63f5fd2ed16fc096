"""After SIGKILL of a whole run, every tracker shows each step once, with the value of the run."""

from __future__ import annotations

import os
import random
import signal
import struct
from pathlib import Path
from typing import Any

import pytest

from faults.conftest import Job, Jobs, jobs, runs, worlds
from regauge.run_folders.series import merge_attempts, summarize_attempts
from regauge.system import jsonl
from unit.test_wandb import read_history

__all__ = ["jobs", "runs", "worlds"]
pytest.importorskip("wandb", reason="not installed: the kills of wandb are not proved")
pytest.importorskip("mlflow", reason="not installed: the kills of mlflow are not proved")
PATIENCE = 120.0
TRACKERS = (
    "jsonl",
    {"kind": "tensorboard", "wait_seconds": PATIENCE},
    {"kind": "mlflow", "wait_seconds": PATIENCE},
    {"kind": "wandb", "mode": "offline", "wait_seconds": PATIENCE},
)
STEPS = 24
Points = list[tuple[int, float]]


def read_tensorboard(folder: Path, name: str) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def read_mlflow(folder: Path, name: str) -> Points:
    from mlflow import MlflowClient

    client: Any = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("regauge")
    [run] = client.search_runs([experiment.experiment_id])
    metrics = client.get_metric_history(run.info.run_id, name)
    return sorted((metric.step, metric.value) for metric in metrics)


def read_wandb(folder: Path, name: str) -> Points:
    return [(row["step"], row[name]) for row in read_history(folder) if name in row]


def read_metrics(folder: Path, name: str) -> Points:
    """Return the values of a metric as reports show them."""
    lines = jsonl.read_lines(folder / "metrics.jsonl", jsonl.StepLine)
    lines = [line for line in lines if "summary" not in line]
    return list(merge_attempts(lines, summarize_attempts(lines, {}))[name])


def round_to_float(points: Points) -> Points:
    """Round values as the event files of TensorBoard do."""
    return [(step, struct.unpack("f", struct.pack("f", value))[0]) for step, value in points]


def assert_each_step_once(folder: Path) -> None:
    for name in ("train/loss", "heldout/loss"):
        expected = read_metrics(folder, name)
        assert expected[-1][0] == STEPS
        assert read_tensorboard(folder, name) == round_to_float(expected)
        assert read_mlflow(folder, name) == expected
        assert read_wandb(folder, name) == expected
    assert [step for step, _ in read_metrics(folder, "train/loss")] == list(range(1, STEPS + 1))


def kill_at(job: Job, step: int) -> None:
    """Start a run, and kill all of its processes once it has logged a step."""
    job.start()
    assert job.process is not None
    job.wait_for_step(step)
    for pid in list_processes(job.process.pid):
        os.kill(pid, signal.SIGKILL)
    job.process.communicate()


def list_processes(pid: int) -> list[int]:
    """Return a process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(descendant for child in children for descendant in list_processes(int(child)))]


@pytest.mark.timeout(900)
def test_a_run_that_is_killed_twice_shows_each_step_once(jobs: Jobs) -> None:
    fault = {"kind": "sleep", "rank": 0, "step": 2, "count": STEPS, "seconds": 0.2}
    changes: dict[str, Any] = {"trackers": TRACKERS, "log_every_steps": 1}
    job = jobs.create(fault, size=1, output=changes, evaluation={"every_steps": 5})
    draw = random.Random()  # noqa: S311
    kill_at(job, draw.randrange(7, 12))
    kill_at(job, draw.randrange(14, 18))
    job.faults = []
    job.finish()
    attempts = {line["attempt"] for line in jsonl.read_lines(job.folder / "metrics.jsonl")}
    assert attempts == {1, 2, 3}
    assert "not delivered" not in job.stderr
    assert "hangs" not in job.stderr, "a wait for a tracker is not a hang"
    assert_each_step_once(job.folder)
