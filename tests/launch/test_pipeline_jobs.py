"""The stages of a pipeline as dependent jobs, on AWS Batch, on Kubernetes and on a real Slurm."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from launch.batch_simulator import BatchSimulator, start_simulator
from launch.cluster_workplace import ClusterWorkplace
from launch.kubernetes_api import CONTEXT, ApiServer
from launch.pipeline_files import (
    PASS,
    list_states,
    read_done_times,
    write_pipeline,
    write_short_pipeline,
)
from launch.slurm_cluster import SlurmCluster, start_slurm
from launch.test_kubernetes_jobs import change
from launch.training_jobs import Workplace, create_workplace, wait_until
from regauge.system.processes import find_free_port

REFUSAL = 68
SHORT = {"stop": {"steps": 6}, "output": {"checkpoint": {"every_steps": 3}}}


@dataclass
class BatchWorkplace(Workplace):
    """A folder whose commands use the simulator of AWS Batch."""

    def build_launch(self) -> dict[str, Any]:
        """Return the table [launch], whose containers see this folder."""
        root = str(self.root)
        return {
            "instance": "c7i.4xlarge",
            "image": "registry.example/regauge:0.1.0",
            "hours": 1.0,
            "environment": {"MASTER_PORT": str(find_free_port())},
            "volumes": [{"name": "files", "mount": root, "kind": "host", "source": root}],
            "target": [{"kind": "aws-batch", "queue": "regauge"}],
        }


@dataclass
class SlurmPipelines(Workplace):
    """A folder whose commands use a Slurm cluster."""

    cluster: SlurmCluster | None = None

    @property
    def environment(self) -> dict[str, str]:
        assert self.cluster is not None
        return self.cluster.environment


@pytest.fixture
def simulator(tmp_path: Path) -> Iterator[BatchSimulator]:
    """Return a simulator whose containers have `workspace` as /workspace."""
    (tmp_path / "workspace").mkdir()
    with start_simulator(tmp_path, {"/workspace": tmp_path / "workspace"}) as simulator:
        yield simulator


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with start_slurm(tmp_path_factory.mktemp("slurm"), proof="pipelines on Slurm") as cluster:
        yield cluster


def submit(workplace: Workplace, target: str, run_file: Path, *overrides: str) -> str:
    return workplace.launch(run_file, "pipeline", *overrides, "--on", target)


def wait_for_refusal(workplace: Workplace, handle: str) -> dict[str, str]:
    """Wait for a pipeline whose gate refuses the model; return the states of its stages."""
    answer = workplace.run("job", "wait", handle)
    status = workplace.read_status(handle)
    assert answer.code == REFUSAL, f"{answer.error}\n{workplace.run('job', 'logs', handle).output}"
    assert (status["state"], status["exit_code"]) == ("failed", REFUSAL)
    assert "stage 'gate'" in answer.error.splitlines()[-1]
    assert "accuracy" in workplace.run("job", "logs", handle).output, "the log of the gate"
    return list_states(status)


def wait_for_success(workplace: Workplace, handle: str) -> None:
    answer = workplace.run("job", "wait", handle, "-o", "json")
    assert answer.code == 0, f"{answer.error}\n{workplace.run('job', 'logs', handle).output}"
    assert set(list_states(answer.document).values()) == {"succeeded"}


def test_batch_runs_the_stages_in_order_and_resumes_a_refused_round(
    simulator: BatchSimulator, tmp_path: Path
) -> None:
    workplace = BatchWorkplace(tmp_path, tmp_path)
    path = tmp_path / "workspace" / "daily.json"
    run_file = write_pipeline(path, tmp_path, workplace.build_launch())
    handle = submit(workplace, "aws_batch", run_file)
    names = ["data", "train", "artifact", "evaluate", "gate", "promote"]
    states = wait_for_refusal(workplace, handle)
    assert states == {**dict.fromkeys(names, "succeeded"), "gate": "failed", "promote": "cancelled"}
    jobs = list(simulator.jobs.values())
    assert [job.request.get("dependsOn", []) for job in jobs] == [
        [],
        *([{"jobId": job.job_id}] for job in jobs[:-1]),
    ]
    assert all(
        before.stopped_at <= after.started_at
        for before, after in pairwise(jobs)
        if before.stopped_at is not None and after.started_at is not None
    )
    assert len(jobs[1].nodes) == 2, "training has two nodes"
    assert jobs[-1].main.process is None, "the promotion has never started"
    assert not (tmp_path / "registry").exists()
    times = read_done_times(tmp_path / "daily")
    assert len(times) == 4
    wait_for_success(workplace, submit(workplace, "aws_batch", run_file, PASS))
    assert read_done_times(tmp_path / "daily").items() > times.items(), "no stage ran again"
    rounds = json.loads((tmp_path / "daily" / "rounds.json").read_text())["rounds"]
    assert [item["state"] for item in rounds] == ["finished"]
    assert (tmp_path / "registry").is_dir()
    assert workplace.run("job", "cleanup", handle).code == 0
    definitions = [item["status"] for item in simulator.definitions.values()]
    assert definitions == ["INACTIVE"] * 6 + ["ACTIVE"] * 6


def test_batch_cancels_all_stages(simulator: BatchSimulator, tmp_path: Path) -> None:
    simulator.has_capacity = False
    workplace = BatchWorkplace(tmp_path, tmp_path)
    path = tmp_path / "workspace" / "daily.json"
    handle = submit(
        workplace, "aws_batch", write_pipeline(path, tmp_path, workplace.build_launch())
    )
    assert set(list_states(workplace.read_status(handle)).values()) == {"pending"}
    assert workplace.run("job", "cleanup", handle).code == 2
    assert workplace.run("job", "cancel", handle).code == 0
    assert workplace.run("job", "wait", handle).code == 130
    states = list_states(workplace.read_status(handle))
    assert set(states.values()) == {"cancelled"}
    assert "has ended already" in workplace.run("job", "cancel", handle).error


def test_a_refused_job_withdraws_the_stages_before_it(
    simulator: BatchSimulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator.has_capacity = False
    accept = simulator.call

    def refuse_third_job(operation: str, body: dict[str, Any]) -> dict[str, Any]:
        simulator.queue_error = "the quota is used" if len(simulator.jobs) > 1 else None
        return accept(operation, body)

    monkeypatch.setattr(simulator, "call", refuse_third_job)
    workplace = BatchWorkplace(tmp_path, tmp_path)
    path = tmp_path / "workspace" / "daily.json"
    run_file = write_pipeline(path, tmp_path, workplace.build_launch())
    answer = workplace.run("launch", str(run_file), "pipeline", "--on", "aws_batch")
    assert answer.code == 2
    assert "the quota is used" in answer.error
    wait_until(lambda: all(job.status == "FAILED" for job in simulator.jobs.values()), "the end")
    assert len(simulator.jobs) == 2
    assert {item["status"] for item in simulator.definitions.values()} == {"INACTIVE"}


def test_kubernetes_runs_the_stages_in_order_and_resumes(
    cluster: ApiServer, tmp_path: Path
) -> None:
    simple = create_workplace(tmp_path)
    workplace = ClusterWorkplace(simple.root, simple.data, cluster=cluster)
    launch = json.loads(workplace.write_job("run", **SHORT).read_text())["launch"]
    run_file = write_short_pipeline(
        tmp_path / "weekly.json", workplace.write_run(**SHORT), tmp_path, launch
    )
    handle = submit(workplace, "kubernetes", run_file)
    assert handle == f"kubernetes://{CONTEXT}/default/jobset/weekly"
    states = wait_for_refusal(workplace, handle)
    assert states == {"train": "succeeded", "gate": "failed", "last": "cancelled"}
    pods = cluster.find_pods("weekly")
    assert [pod["metadata"]["name"].rpartition("-")[0] for pod in pods] == [
        "weekly-gate-0",
        "weekly-train-0-0",
        "weekly-train-0-1",
    ]
    stages = workplace.read_status(handle)["stages"]
    log = workplace.run("job", "logs", stages[0]["handle"]).output
    assert "train" in log
    assert workplace.run("job", "cleanup", handle).code == 0
    assert cluster.store.list("jobs") == []
    times = read_done_times(tmp_path / "weekly")
    assert list(times) == ["1-train"]
    wait_for_success(workplace, submit(workplace, "kubernetes", run_file, PASS))
    assert read_done_times(tmp_path / "weekly").items() > times.items(), "no stage ran again"
    assert workplace.run("job", "cleanup", handle).code == 0


def test_kubernetes_cancels_all_stages(cluster: ApiServer, tmp_path: Path) -> None:
    simple = create_workplace(tmp_path)
    workplace = ClusterWorkplace(simple.root, simple.data, cluster=cluster)
    launch = json.loads(workplace.write_job("run", **SHORT).read_text())["launch"]
    run = workplace.write_run(**SHORT)
    run_file = write_short_pipeline(tmp_path / "stopped.json", run, tmp_path, launch)
    with change(cluster.kubelet, capacity=0):
        handle = submit(workplace, "kubernetes", run_file)
        wait_until(lambda: len(cluster.find_pods("stopped")) == 2, "the pods")
        status = workplace.read_status(handle)
        assert set(list_states(status).values()) == {"pending"}
        assert "no node has room" in status["reason"]
        assert status["stages"][1]["reason"] == "it waits for stage 'train'"
        assert workplace.run("job", "cancel", handle).code == 0
        assert workplace.run("job", "wait", handle).code == 130
        states = list_states(workplace.read_status(handle))
        assert set(states.values()) == {"cancelled"}
        assert workplace.run("job", "cleanup", handle).code == 0


def test_slurm_runs_the_stages_in_order_and_resumes(slurm: SlurmCluster, tmp_path: Path) -> None:
    simple = create_workplace(tmp_path)
    workplace = SlurmPipelines(simple.root, simple.data, cluster=slurm)
    run = workplace.write_run(**SHORT)
    # A job of Slurm has no variables of the submitting shell.
    variables = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    launch = {"environment": variables}
    run_file = write_short_pipeline(tmp_path / "weekly.json", run, tmp_path, launch)
    handle = submit(workplace, "slurm", run_file)
    states = wait_for_refusal(workplace, handle)
    assert states == {"train": "succeeded", "gate": "failed", "last": "cancelled"}
    messages = [event["message"] for event in list_events(workplace, handle)]
    assert sum("attempt 1 on" in message for message in messages) == 2
    times = read_done_times(tmp_path / "weekly")
    assert list(times) == ["1-train"]
    wait_for_success(workplace, submit(workplace, "slurm", run_file, PASS))
    assert read_done_times(tmp_path / "weekly").items() > times.items(), "no stage ran again"
    for item in workplace.handles:
        assert workplace.run("job", "cleanup", item).code == 0
    assert not (tmp_path / "weekly.slurm").exists()


def list_events(workplace: Workplace, handle: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = workplace.run("job", "events", handle, "-o", "json").document[
        "events"
    ]
    return events


def test_slurm_cancels_all_stages(slurm: SlurmCluster, tmp_path: Path) -> None:
    simple = create_workplace(tmp_path)
    workplace = SlurmPipelines(simple.root, simple.data, cluster=slurm)
    later = {"target": [{"kind": "slurm", "options": {"begin": "now+1hour"}}]}
    run_file = write_short_pipeline(
        tmp_path / "later.json", workplace.write_run(**SHORT), tmp_path, later
    )
    handle = submit(workplace, "slurm", run_file)
    assert set(list_states(workplace.read_status(handle)).values()) == {"pending"}
    assert workplace.run("job", "cancel", handle).code == 0
    assert workplace.run("job", "wait", handle).code == 130
    assert set(list_states(workplace.read_status(handle)).values()) == {"cancelled"}
    assert workplace.run("job", "cleanup", handle).code == 0
