"""After a SIGKILL every tracker shows each step of a run once: of a rank, and of the whole run."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from faults.conftest import Job, Jobs, jobs, runs, worlds
from regauge.jsonl import read_lines
from unit.test_wandb import read_history

__all__ = ["jobs", "runs", "worlds"]
PATIENCE = 120.0
TRACKERS = (
    "jsonl",
    "tensorboard",
    {"kind": "mlflow", "wait_seconds": PATIENCE},
    {"kind": "wandb", "mode": "offline", "wait_seconds": PATIENCE},
)
STEPS = 24


def read_tensorboard(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in events.Scalars("train/loss")]


def read_mlflow(folder: Path) -> list[int]:
    from mlflow import MlflowClient

    client: Any = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("regauge")
    [run] = client.search_runs([experiment.experiment_id])
    return [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")]


def assert_each_step_once(job: Job) -> None:
    expected = sorted({line["step"] for line in read_lines(job.folder / "metrics.jsonl")} - {0})
    assert expected[-1] == STEPS
    wandb = [row["step"] for row in read_history(job.folder) if "train/loss" in row]
    steps = {
        "tensorboard": read_tensorboard(job.folder),
        "mlflow": read_mlflow(job.folder),
        "wandb": wandb,
    }
    for name, values in steps.items():
        assert Counter(values) == Counter(expected), name


@pytest.mark.timeout(900)
def test_a_killed_rank_leaves_each_step_once(jobs: Jobs) -> None:
    job = jobs.create({"kind": "kill", "rank": 0, "step": 10}, output={"trackers": TRACKERS})
    job.start().wait()
    assert job.code == 0, job.stderr
    assert job.triggered_faults
    assert_each_step_once(job)


@pytest.mark.timeout(900)
def test_a_killed_run_leaves_each_step_once(jobs: Jobs) -> None:
    fault = {"kind": "sleep", "rank": 0, "step": 9, "count": 15, "seconds": 0.3}
    job = jobs.create(fault, output={"trackers": TRACKERS}).start()
    job.wait_for_step(10)
    assert job.process is not None
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.communicate()
    job.faults = []
    job.start().wait()
    assert job.code == 0, job.stderr
    assert_each_step_once(job)
