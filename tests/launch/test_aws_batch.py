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
from end_to_end.predicting import read_output_files, write_records
from faults.conftest import artifact, model
from launch.batch_simulator import BatchSimulator, SimulatedJob, start_simulator
from launch.training_jobs import count_steps
from regauge.config import dump, merge
from regauge.jobs.job_spec import find_machine
from regauge.jobs.targets import FINAL_STATES, Handle, JobSpec, JobState, JobStatus, LaunchPlan
from regauge.jobs.targets.aws_batch import AwsBatch
from regauge.system.errors import RESTART_CODES, SettingsError
from regauge.system.processes import find_free_port
from regauge.system.timing import wait_for

__all__ = ["artifact", "model"]
SECONDS = 300.0
STEPS = 120
IMAGE = "registry.example/regauge:0.1.0"
ROLE = "arn:aws:iam::123456789012:role/regauge"
REFERENCE = "arn:aws:secretsmanager:us-east-1:123456789012:secret:token-AbCdEf"
SENTINEL = "hf_Q2xhc3NpZmllZFRva2VuVmFsdWU"
"""The value behind that ARN, which no file may contain."""
LAUNCH: dict[str, Any] = {
    "instance": "c7i.4xlarge",
    "image": IMAGE,
    "target": [{"kind": "aws-batch", "queue": "regauge", "execution_role": ROLE}],
}
TRAINING: dict[str, Any] = {
    "stop": {"steps": STEPS},
    "output": {"checkpoint": {"every_steps": 10, "keep_last": 3}},
    "execution": {
        "processes": 1,
        "nodes": {"count": 2, "join_seconds": 60.0},
        "supervision": {"preflight": "brief"},
        "timeout_seconds": 60,
    },
}


@pytest.fixture
def simulator(tmp_path: Path) -> Iterator[BatchSimulator]:
    """Return a simulator; its containers have `workspace` as /workspace, and see `data`.

    `workspace` is missing: an image need not contain the run file.
    """
    (tmp_path / "data").mkdir()
    with start_simulator(tmp_path, {"/workspace": tmp_path / "workspace"}) as simulator:
        yield simulator


def call(*arguments: str, code: int = 0) -> str:
    """Run a command of Regauge; return its standard output, or its last error line."""
    command = [sys.executable, "-m", "regauge", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == code, process.stdout + process.stderr
    return process.stdout if code == 0 else process.stderr.splitlines()[-1]


def write_run_file(root: Path, **changes: Any) -> Path:
    """Write a training run for this machine, and its dataset for the containers."""
    data = root / "data"
    packed = datasets.write_packed(data / "packed")
    tables = settings(data / "out", packed, "mlm", **merge(TRAINING, changes))
    launch = LAUNCH | {
        "environment": {"MASTER_PORT": str(find_free_port())},
        "volumes": [{"name": "data", "mount": str(data), "kind": "host", "source": str(data)}],
    }
    path = root / "run.json"
    path.write_text(json.dumps(dump(tables) | {"launch": launch}))
    return path


def submit(path: Path, verb: str, *overrides: str) -> str:
    output = call("launch", str(path), verb, *overrides, "--on", "aws_batch", "-o", "json")
    return str(json.loads(output)["handle"])


def find_job(simulator: BatchSimulator, handle: str) -> SimulatedJob:
    return simulator.jobs[handle.rpartition("/")[2]]


def read_status(handle: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(call("job", "status", handle, "--why", "--json"))
    return document


def wait_until(job: SimulatedJob, condition: Callable[[], bool], problem: str) -> None:
    """Wait for a condition while a job has not failed."""

    def check_job() -> None:
        assert job.status != "FAILED", f"{problem}: {job.attempts}"

    assert wait_for(condition, SECONDS, poll_seconds=0.05, on_poll=check_job), problem


def list_text_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.suffix in (".json", ".jsonl", ".log", ".md")]


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
    simulator.secrets[REFERENCE] = SENTINEL
    path = write_run_file(tmp_path)
    handle = submit(path, "train", f"launch.secrets.HF_TOKEN={REFERENCE}")
    job, output = find_job(simulator, handle), tmp_path / "data" / "out"
    wait_for_state(Handle.parse(handle), "running")
    assert read_status(handle)["attempt"] == 1, "read first: it can last as long as the training"
    wait_until(job, lambda: count_steps(output) >= 30, "the run does not start")
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
    assert all(node["host"].startswith("i-") for node in status["nodes"])
    assert "2 nodes did not meet" in call("job", "logs", handle, "--attempt", "1") or not lost
    assert "Resuming from step" in call("job", "logs", handle)
    assert_same(train_undisturbed(tmp_path, path), output)
    texts = [json.dumps(request) for request in simulator.requests]
    texts += [file.read_text(errors="replace") for file in list_text_files(tmp_path)]
    assert any(REFERENCE in text for text in texts)
    assert not [text for text in texts if SENTINEL in text], "the secret was written"


def test_the_requests_are_rehearsed_on_this_machine(tmp_path: Path) -> None:
    path = write_run_file(tmp_path, stop={"steps": 100_000})
    output = call("launch", str(path), "train", "--on", "aws_batch", "--rehearse", "-o", "json")
    report = json.loads(output)
    assert (report["nodes"], report["target"]) == (2, "aws-batch")
    assert report["attempts"] > 1
    assert report["weights_equal"]
    assert report["rows_equal"]
    assert report["recovery_seconds"] > 0


# Jobs of one container, whose command is a shell


def build_plan(script: str, **changes: Any) -> LaunchPlan:
    """Return the plan of a job that runs a script of the shell."""
    values: dict[str, Any] = {
        "name": "script",
        "verb": "train",
        "command": ("/bin/sh", "-c", script),
        "min_nodes": changes.get("max_nodes", 1),
        "max_nodes": 1,
        "processes": 1,
        "machine": find_machine("c7i.4xlarge", {}),
        "image": IMAGE,
        "environment": {"MASTER_PORT": str(find_free_port())},
    }
    return AwsBatch(queue="regauge").plan(JobSpec(**values | changes))


def launch(plan: LaunchPlan) -> Handle:
    return AwsBatch(queue="regauge").submit(plan)


def wait_for_end(handle: Handle) -> JobStatus:
    return wait_for_state(handle, *FINAL_STATES)


def wait_for_state(handle: Handle, *states: JobState) -> JobStatus:
    launcher = AwsBatch()
    has_ended = wait_for(
        lambda: launcher.find_status(handle).state in states, SECONDS, poll_seconds=0.05
    )
    status = launcher.find_status(handle)
    assert has_ended, f"{handle} is {status.state}"
    return status


SECOND = 'test "$AWS_BATCH_JOB_ATTEMPT" = 2 || '


@pytest.mark.parametrize(
    ("script", "codes"),
    [
        *((f"{SECOND}exit {code}", [code, 0]) for code in RESTART_CODES),
        *((f"exit {code}", [code]) for code in (1, 2, 64, 66)),
        ("exit 75", [75, 75]),
    ],
)
def test_the_exit_code_decides_whether_an_attempt_follows(
    simulator: BatchSimulator, script: str, codes: list[int]
) -> None:
    status = wait_for_end(handle := launch(build_plan(script, max_attempts=2)))
    attempts = find_job(simulator, str(handle)).attempts
    assert [attempt["container"]["exitCode"] for attempt in attempts] == codes
    assert status.state == ("failed" if codes[-1] else "succeeded")
    assert (status.attempt, status.exit_code) == (len(codes), codes[-1])


def test_a_reclaimed_machine_is_replaced(simulator: BatchSimulator) -> None:
    handle = launch(build_plan(f"{SECOND}sleep 600"))
    wait_for_state(handle, "running")
    simulator.reclaim(find_job(simulator, str(handle)).main)
    status = wait_for_end(handle)
    assert (status.state, status.attempt) == ("succeeded", 2)
    messages = [event.message for event in AwsBatch().list_events(handle)]
    assert any("attempt 1 ended: Host EC2 (instance i-" in message for message in messages)


def test_a_job_without_capacity_is_pending_with_its_reason(simulator: BatchSimulator) -> None:
    simulator.has_capacity = False
    handle = launch(build_plan("exit 0"))
    wait_until(
        find_job(simulator, str(handle)),
        lambda: AwsBatch().find_status(handle).reason != "",
        "there is no reason",
    )
    document = read_status(str(handle))
    assert document["state"] == "pending"
    assert document["reason"].startswith("CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY")
    assert document["usd_per_hour"] == pytest.approx(0.714)
    simulator.has_capacity = True
    assert wait_for_end(handle).state == "succeeded"


def test_a_job_that_never_starts_fails_with_its_reason(simulator: BatchSimulator) -> None:
    simulator.has_capacity, simulator.pending_seconds = False, 0.2
    status = wait_for_end(launch(build_plan("exit 0")))
    assert status.state == "failed"
    assert "JobStateTimeLimit action due to reason: CAPACITY" in status.reason


def test_a_queued_job_is_cancelled_once(simulator: BatchSimulator) -> None:
    simulator.has_capacity = False
    handle = launch(build_plan("exit 0"))
    wait_for_state(handle, "pending")
    call("job", "cancel", str(handle))
    assert wait_for_end(handle).state == "cancelled"
    operations = [operation for operation, _ in simulator.requests]
    assert "canceljob" in operations
    assert "terminatejob" not in operations
    line = call("job", "cancel", str(handle), code=2)
    assert "has ended already (cancelled); remove it with" in line


def test_a_running_job_is_terminated_with_its_nodes(simulator: BatchSimulator) -> None:
    serve = (
        "import os, socket, time; "
        "server = socket.create_server(('', int(os.environ['MASTER_PORT']))); time.sleep(600)"
    )
    script = (
        'test "$AWS_BATCH_JOB_NODE_INDEX" = 1 && exec sleep 600; '
        f'exec {sys.executable} -c "{serve}"'
    )
    handle = launch(build_plan(script, max_nodes=2))
    job = find_job(simulator, str(handle))
    wait_until(job, lambda: job.nodes[1].process is not None, "the child node does not start")
    AwsBatch().cancel(handle)
    status = wait_for_end(handle)
    assert status.state == "cancelled"
    assert len(job.attempts) == 1, "a terminated job is not retried"
    assert all(node.process and node.process.poll() is not None for node in job.nodes)


def test_a_job_that_exceeds_its_time_fails(simulator: BatchSimulator) -> None:
    plan = build_plan("exec sleep 600", hours=1)
    plan.documents[0].content["timeout"]["attemptDurationSeconds"] = 1
    status = wait_for_end(launch(plan))
    assert status.state == "failed", simulator.jobs
    assert status.failure is not None
    assert status.failure.kind == "limit"


def test_cleanup_deregisters_the_definition_and_lists_what_is_left(
    simulator: BatchSimulator,
) -> None:
    simulator.desired_vcpus = 32
    simulator.environment_tags = {
        "regauge-usd-per-machine-hour": "0.714",
        "regauge-machine-vcpus": "16",
        "regauge-price-date": "2026-07-20",
    }
    handle = launch(build_plan("sleep 3"))
    with pytest.raises(SettingsError, match="stop it first: regauge job cancel aws-batch://"):
        AwsBatch().clean_up(handle)
    wait_for_end(handle)
    leftovers = json.loads(call("job", "cleanup", str(handle), "--json"))["leftovers"]
    assert [item["status"] for item in simulator.definitions.values()] == ["INACTIVE"]
    queue, environment, logs = leftovers
    assert queue["remedy"].endswith("delete-job-queue --region us-east-1 --job-queue regauge")
    assert "32 vCPUs run now" in environment["reason"]
    assert "about 1.43 USD per hour (price of 2026-07-20)" in environment["reason"]
    assert "delete-compute-environment" in environment["remedy"]
    assert "delete-log-group" in logs["remedy"]


def test_a_refused_submission_leaves_no_definition(simulator: BatchSimulator) -> None:
    simulator.queue_error = "You exceeded the quota of jobs in this queue"
    with pytest.raises(SettingsError, match=r"exceeded the quota .*; request a higher quota"):
        launch(build_plan("exit 0"))
    assert [item["status"] for item in simulator.definitions.values()] == ["INACTIVE"]
    assert not simulator.jobs


SPOT = "which a multi-node parallel job cannot run on"


@pytest.mark.parametrize(
    ("change", "launcher", "environment", "message"),
    [
        ({}, {"queue": "other"}, "EC2", "there is no job queue 'other' in us-east-1"),
        ({"state": "DISABLED"}, {}, "EC2", "the job queue 'regauge' is DISABLED; enable it"),
        ({"schedulingPolicyArn": "arn"}, {}, "EC2", "fair-share policy; set share_identifier"),
        ({}, {"share_identifier": "a"}, "EC2", "fair-share policy; remove share_identifier"),
        ({}, {}, "SPOT", SPOT),
    ],
)
def test_a_queue_that_cannot_run_the_job_is_found_before_anything_is_registered(
    simulator: BatchSimulator,
    change: dict[str, str],
    launcher: dict[str, str],
    environment: str,
    message: str,
) -> None:
    simulator.queue |= change
    simulator.environment_type = environment
    target = AwsBatch(**{"queue": "regauge", **launcher})
    with pytest.raises(SettingsError, match=message):
        target.submit(target.plan(build_plan("exit 0", max_nodes=2).job))
    assert not simulator.definitions


def test_an_unknown_job_is_one_line(simulator: BatchSimulator) -> None:
    assert not simulator.jobs
    line = call("job", "status", "aws-batch://us-east-1/none", code=2)
    assert line.startswith("regauge: AWS Batch in us-east-1 has no job none; correct the handle")


def test_logs_are_those_of_an_attempt(simulator: BatchSimulator) -> None:
    script = 'echo "attempt $AWS_BATCH_JOB_ATTEMPT"; test $AWS_BATCH_JOB_ATTEMPT = 2 || exit 75'
    handle = launch(build_plan(script))
    wait_for_end(handle)
    assert call("job", "logs", str(handle), "--follow").splitlines() == ["attempt 2"]
    assert call("job", "logs", str(handle), "--attempt", "1").splitlines() == ["attempt 1"]
    assert "has no log of attempt 3" in call("job", "logs", str(handle), "--attempt", "3", code=2)
    assert simulator.jobs


# The launching process, and arrays


def test_the_job_continues_without_the_process_that_launched_it(
    simulator: BatchSimulator, tmp_path: Path
) -> None:
    path = write_run_file(tmp_path, stop={"steps": 8}, execution={"nodes": {"count": 1}})
    command = [sys.executable, "-m", "regauge", "launch", str(path), "train", "--on", "aws_batch"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        assert wait_for(lambda: bool(simulator.jobs), SECONDS, poll_seconds=0.005)
        process.kill()
    handle = f"aws-batch://us-east-1/{next(iter(simulator.jobs))}"
    document = json.loads(call("job", "wait", handle, "--json"))
    assert document["state"] == "succeeded"
    assert document["output"] == str(tmp_path / "data" / "out")
    assert count_steps(tmp_path / "data" / "out") == 8


def test_an_array_shares_the_records_of_predict(
    simulator: BatchSimulator, artifact: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    for name in ("a", "b", "c"):
        write_records(data / f"{name}.jsonl", 20, seed=ord(name))
    tables: dict[str, Any] = {
        "artifact": str(artifact),
        "source": {"kind": "jsonl", "files": [str(data / "*.jsonl")]},
        "predict": {"shard_records": 8},
        "output": {"folder": str(data / "vectors")},
    }
    volume = {"name": "data", "mount": str(data), "kind": "host", "source": str(data)}
    path = tmp_path / "predict.json"
    path.write_text(json.dumps(tables | {"launch": LAUNCH | {"volumes": [volume], "jobs": 2}}))
    handle = submit(path, "predict")
    document = json.loads(call("job", "wait", handle, "--json"))
    assert document["state"] == "succeeded"
    assert [node["state"] for node in document["nodes"]] == ["succeeded", "succeeded"]
    assert sorted(item.name for item in (data / "vectors" / "jobs").iterdir()) == [
        "0-of-2",
        "1-of-2",
    ]
    single = tmp_path / "single.json"
    single.write_text(json.dumps(tables | {"output": {"folder": str(tmp_path / "single")}}))
    call("predict", str(single))
    assert read_output_files(data / "vectors") == read_output_files(tmp_path / "single")
    assert len(simulator.jobs) == 1
