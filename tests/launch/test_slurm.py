"""Jobs on a real Slurm: lost nodes, preemption in both modes, arrays, and bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from distributed import datasets
from distributed.jobs import lines, losses
from distributed.test_resume import assert_same
from end_to_end.predicting import export_run, read_table, train_model, write_records
from launch.slurm_cluster import NODES, SlurmCluster, start_slurm
from launch.training_jobs import (
    STEPS,
    Workplace,
    count_steps,
    find_recovery_seconds,
    wait_until,
)
from regauge.machines.catalog import find_instance
from regauge.system.processes import find_free_port
from regauge.system.timing import PAUSE_SECONDS

TWO_NODES = "execution.nodes.count=2"
ON_SLURM = ("--on", "slurm")
HIGH = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null")


@dataclass
class SlurmWorkplace(Workplace):
    """A folder whose commands use a cluster."""

    cluster: SlurmCluster | None = None

    @property
    def environment(self) -> dict[str, str]:
        assert self.cluster is not None
        return self.cluster.environment

    def show(self, handle: str) -> str:
        assert self.cluster is not None
        return self.cluster.run("scontrol", "--oneliner", "show", "job", find_id(handle))

    def read_state(self, handle: str) -> str:
        return str(self.read_status(handle)["state"])

    def wait_for_status(
        self, handle: str, condition: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any]:
        """Return the first status that meets a condition."""
        statuses: list[dict[str, Any]] = []

        def meets_condition() -> bool:
            statuses.append(self.read_status(handle))
            return condition(statuses[-1])

        wait_until(meets_condition, "the status")
        return statuses[-1]

    def wait_for_success(self, handle: str) -> dict[str, Any]:
        answer = self.run("job", "wait", handle, "--timeout", "480", "-o", "json")
        assert answer.code == 0, answer.error + self.read_logs()
        assert answer.document["state"] == "succeeded"
        return answer.document

    def follow(self, handle: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "regauge", "job", "logs", handle, "--follow"]
        return subprocess.Popen(
            command, env=self.environment, cwd=self.root, stdout=subprocess.PIPE, text=True
        )

    def read_logs(self) -> str:
        paths = sorted(self.root.glob("*.slurm/*.log"))
        return "\n".join(f"{path}:\n{path.read_text()[-1500:]}" for path in paths)


def find_id(handle: str) -> str:
    return handle.rpartition("/")[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Return a cluster that requeues preempted jobs."""
    root = tmp_path_factory.mktemp("slurm")
    with start_slurm(root, proof="the launcher 'slurm' on a real cluster") as slurm:
        yield slurm


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_packed(tmp_path_factory.mktemp("data") / "data", 40, 10)


@pytest.fixture
def workplace(cluster: SlurmCluster, data: Path, tmp_path: Path) -> Iterator[SlurmWorkplace]:
    workplace = SlurmWorkplace(tmp_path, data, cluster=cluster)
    yield workplace
    sys.stdout.write(workplace.read_logs())  # pytest shows it if the test failed
    workplace.clean_up()
    for node in NODES:
        if node not in cluster.daemons:
            cluster.start_node(node)
    wait_until(cluster.is_idle, "idle nodes")


@pytest.fixture(scope="module")
def whole_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of the same run without Slurm: two processes of this machine."""
    workplace = Workplace(tmp_path_factory.mktemp("undisturbed"), data)
    run_file = workplace.write_run("whole")
    answer = workplace.run("train", str(run_file), "execution.processes=2")
    assert answer.code == 0, answer.error
    return workplace.root / "out-whole"


def test_a_job_outlives_its_launcher_and_a_lost_node(
    workplace: SlurmWorkplace,
    cluster: SlurmCluster,
    whole_run: Path,
    figure: Callable[[str, float], None],
) -> None:
    handle = launch_and_kill(workplace, workplace.write_run(), TWO_NODES)
    folder = workplace.root / "out-run"
    # The status is read during the start, because reading it can last as long as the training.
    status = workplace.wait_for_status(handle, lambda status: status["state"] == "running")
    assert status["attempt"] == 1
    assert [node["host"] for node in status["nodes"]] == list(NODES)
    wait_until(lambda: count_steps(folder) >= 30, "step 30")
    assert "attempt 1 on 2 nodes: " in workplace.read_logs(), "each node has a supervisor"
    lost_at, step = time.time(), count_steps(folder)
    cluster.kill_node(NODES[1])
    wait_until(lambda: workplace.read_state(handle) == "restarting", "the requeue")
    cluster.start_node(NODES[1])
    seconds = find_recovery_seconds(folder, lost_at, step)
    figure("seconds from the loss of a node of Slurm to the next step, with its delay", seconds)
    assert workplace.wait_for_success(handle)["attempt"] == 2
    assert_same(whole_run, folder)


def launch_and_kill(workplace: SlurmWorkplace, run_file: Path, *arguments: str) -> str:
    """Launch a job, kill the launching process after it has printed the handle; return that."""
    command = [sys.executable, "-m", "regauge", "launch", str(run_file), "train", *arguments]
    with subprocess.Popen(
        [*command, *ON_SLURM],
        env=workplace.environment,
        cwd=workplace.root,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        text = process.stdout.read(1)
        while "\n" not in text.partition("handle: ")[2]:
            text += process.stdout.read(1)
        os.killpg(process.pid, signal.SIGKILL)
    handle = text.partition("handle: ")[2].strip()
    workplace.handles.append(handle)
    return handle


def test_a_requeued_job_equals_the_undisturbed_one(
    workplace: SlurmWorkplace, cluster: SlurmCluster, whole_run: Path
) -> None:
    handle = workplace.launch(workplace.write_run(), "train", TWO_NODES, *ON_SLURM)
    folder = workplace.root / "out-run"
    with workplace.follow(handle) as follower:
        wait_until(lambda: count_steps(folder) >= 30, "step 30")
        cluster.run("sbatch", *HIGH, "--wrap=sleep 2")
        status = workplace.wait_for_status(handle, lambda status: status["state"] == "preempted")
        assert "BeginTime" in status["reason"]
        assert workplace.wait_for_success(handle)["attempt"] == 2
        output, _ = follower.communicate(timeout=60)
    assert "(attempt 2)" in output
    assert f"steps: {STEPS} (finished)" in output, "the log of the node with rank 0"
    assert [line["attempt"] for line in lines(folder)][-1] == 2
    assert_same(whole_run, folder)
    events = workplace.run("job", "events", handle, "-o", "json").document["events"]
    assert any("stopped by Slurm: requeue" in event["message"] for event in events)


@pytest.mark.parametrize("partition", ["low", "grace"])
def test_a_preempted_job_requeues_itself_if_slurm_does_not(
    data: Path,
    whole_run: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    partition: str,
) -> None:
    """With PreemptMode=CANCEL, `--requeue` has no effect on a preemption.

    In a grace period Slurm signals the nodes alone, and the job still runs. One attempt is allowed
    to fail, and a preemption is no failure.
    """
    root = tmp_path_factory.mktemp("slurm-cancel")
    proof = "a requeue under PreemptMode=CANCEL"
    with start_slurm(root, preempt_mode="CANCEL", proof=proof) as cluster:
        workplace = SlurmWorkplace(tmp_path, data, cluster=cluster)
        launch = {"max_attempts": 1, "target": [{"kind": "slurm", "partition": partition}]}
        run_file = write_launched(workplace, launch)
        handle = workplace.launch(run_file, "train", TWO_NODES, *ON_SLURM)
        folder = workplace.root / "out-run"
        wait_until(lambda: count_steps(folder) >= 30, "step 30")
        cluster.run("sbatch", *HIGH, "--wrap=sleep 2")
        wait_until(lambda: workplace.read_state(handle) == "preempted", "the preemption")
        status = workplace.wait_for_success(handle)
        assert status["attempt"] == 2
        assert "Restarts=1" in workplace.show(handle)
        assert_same(whole_run, folder)
        assert [line["attempt"] for line in lines(folder)][-1] == 2
        events = workplace.run("job", "events", handle, "-o", "json").document["events"]
        messages = [event["message"] for event in events]
        assert messages.count("stopped by Slurm: preemption") == 1
        assert any("(failures: 0 of 1)" in text for text in messages if "attempt 2" in text)


def test_a_job_at_its_time_limit_is_requeued(
    workplace: SlurmWorkplace, cluster: SlurmCluster
) -> None:
    """The signal reaches the script, which passes it to the nodes and asks for a requeue.

    Other signals to the job meanwhile let Slurm show SIGNALING as its state. One attempt is allowed
    to fail, and a time limit is no failure.
    """
    # Slurm signals at most a minute early, so the job has at least 30 s.
    target = {"kind": "slurm", "grace_seconds": 30, "cpus": 1}
    launch = {"hours": 2 / 60, "target": [target], "max_attempts": 1}
    run_file = write_launched(workplace, launch, stop={"steps": 1_000_000})
    handle = workplace.launch(run_file, "train", "execution.compile=off", *ON_SLURM)
    wait_until(lambda: count_steps(workplace.root / "out-run") > 0, "a step")
    states = set()

    def is_requeued() -> bool:
        cluster.run("scancel", "--signal=CONT", find_id(handle), is_checked=False)
        record = workplace.show(handle)
        states.add(record.partition("JobState=")[2].partition(" ")[0])
        return "Restarts=1" in record

    wait_until(is_requeued, "the requeue")
    assert "SIGNALING" in states
    assert "stopped by Slurm: limit" in workplace.read_logs()
    assert workplace.read_state(handle) in ("running", "restarting")
    steps = count_steps(workplace.root / "out-run")
    wait_until(lambda: count_steps(workplace.root / "out-run") > steps, "a step of attempt 2")
    assert workplace.read_status(handle)["attempt"] >= 2
    assert steps > 0


def test_a_suspended_job_continues_in_the_same_attempt(
    workplace: SlurmWorkplace, cluster: SlurmCluster, whole_run: Path
) -> None:
    """After the pause each supervisor has missed the heartbeats of all processes and nodes."""
    execution = {"nodes": {"node_timeout_seconds": 1.0}}
    run_file = workplace.write_run(execution=execution)
    handle = workplace.launch(run_file, "train", TWO_NODES, *ON_SLURM)
    folder = workplace.root / "out-run"
    wait_until(lambda: count_steps(folder) >= 10, "step 10")
    cluster.run("scontrol", "suspend", find_id(handle))
    wait_until(lambda: "JobState=SUSPENDED" in workplace.show(handle), "the suspension")
    time.sleep(5 * PAUSE_SECONDS)  # a pause must be longer than a busy machine's
    cluster.run("scontrol", "resume", find_id(handle))
    assert workplace.wait_for_success(handle)["attempt"] == 1
    attempts = [json.loads(text) for text in (folder / "attempts.jsonl").read_text().splitlines()]
    assert [line["outcome"] for line in attempts if "outcome" in line] == ["finished"]
    assert_same(whole_run, folder)


def write_launched(workplace: SlurmWorkplace, launch: dict[str, Any], **changes: Any) -> Path:
    """Write a run file with a table [launch]; return its path."""
    path = workplace.write_run(**changes)
    path.write_text(json.dumps({**json.loads(path.read_text()), "launch": launch}))
    return path


def test_an_elastic_job_continues_without_a_lost_node(
    workplace: SlurmWorkplace,
    cluster: SlurmCluster,
    whole_run: Path,
    figure: Callable[[str, float], None],
) -> None:
    handle = workplace.launch(
        workplace.write_run(), "train", "execution.nodes.count=1:2", *ON_SLURM
    )
    folder = workplace.root / "out-run"
    wait_until(lambda: count_steps(folder) >= 30, "step 30")
    lost_at, step = time.time(), count_steps(folder)
    attempt = max(line["attempt"] for line in lines(folder))
    cluster.kill_node(NODES[1])
    wait_until(lambda: max(line["attempt"] for line in lines(folder)) > attempt, "a new attempt")
    wait_until(lambda: count_steps(folder) > step, "the next step")
    seconds = time.time() - lost_at
    figure("seconds from the loss of a node of an elastic job of Slurm to the next step", seconds)
    status = workplace.wait_for_success(handle)
    assert status["attempt"] == 1, "Slurm started no other attempt"
    attempts = [json.loads(text) for text in (folder / "attempts.jsonl").read_text().splitlines()]
    ends = [(line["outcome"], line["nodes"]) for line in attempts if "outcome" in line]
    assert ends == [("node", 2), ("finished", 1)]
    assert losses(lines(folder)) == pytest.approx(losses(lines(whole_run)), rel=1e-4)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = train_model(tmp_path_factory.mktemp("encoder"))
    return export_run(model, tmp_path_factory.mktemp("exported") / "artifact")


def test_an_array_predicts_each_record_once(workplace: SlurmWorkplace, artifact: Path) -> None:
    source = write_records(workplace.root / "texts.jsonl", 600)
    run = {
        "artifact": str(artifact),
        "source": {"kind": "jsonl", "files": [str(source)]},
        "output": {"folder": str(workplace.root / "out-array")},
        "predict": {"shard_records": 50},
        "execution": {"workers": 1},
        "launch": {"jobs": 2, "target": [{"kind": "slurm", "cpus": 1}]},
    }
    path = workplace.root / "embed.json"
    path.write_text(json.dumps(run))
    handle = workplace.launch(path, "predict", *ON_SLURM)
    status = workplace.wait_for_success(handle)
    states = [(node["index"], node["state"], node["exit_code"]) for node in status["nodes"]]
    assert states == [(0, "succeeded", 0), (1, "succeeded", 0)]
    table = read_table(workplace.root / "out-array")
    assert sorted(table["id"].to_pylist()) == list(range(600))
    assert workplace.run("job", "logs", handle, "--rank", "1").output
    answer = workplace.run("job", "logs", handle, "--rank", "2")
    assert answer.code == 2
    assert "has no job 2; set --rank to at most 1" in answer.error
    one = workplace.read_status(f"{handle}_1")
    assert one["state"] == "succeeded"


def test_a_pending_job_has_a_reason_and_can_be_cancelled_once(
    workplace: SlurmWorkplace, cluster: SlurmCluster
) -> None:
    holder = cluster.run("sbatch", "--parsable", *HIGH, "--wrap=sleep 300")
    price = {"execution": {"price": {"instance": "c6i.xlarge", "market": "on-demand"}}}
    launch = {"target": [{"kind": "slurm", "partition": "high"}]}
    run_file = write_launched(workplace, launch, **price)
    handle = workplace.launch(run_file, "train", TWO_NODES, *ON_SLURM)
    wait_until(lambda: "Reason=None" not in workplace.show(handle), "the reason")
    status = workplace.read_status(handle)
    assert status["state"] == "pending"
    assert status["reason"].startswith("Resources: not enough nodes")
    assert status["usd_per_hour"] == pytest.approx(2 * find_instance("c6i.xlarge").usd_per_hour)
    assert status["price_date"] == str(find_instance("c6i.xlarge").as_of)
    refusal = workplace.run("job", "cleanup", handle)
    assert refusal.code == 2
    assert f"{handle} is pending; stop it first" in refusal.error
    assert workplace.run("job", "cancel", handle).code == 0
    assert workplace.read_state(handle) == "cancelled"
    again = workplace.run("job", "cancel", handle)
    assert again.code == 2
    assert len(again.error.splitlines()) == 1
    assert f"{handle} has ended already (cancelled); remove it with" in again.error
    assert workplace.run("job", "wait", handle).code == 130
    assert workplace.run("job", "cleanup", handle).code == 0
    assert not list(workplace.root.glob("*.slurm"))
    cluster.run("scancel", holder)


def test_a_running_job_is_cancelled_without_another_attempt(workplace: SlurmWorkplace) -> None:
    handle = workplace.launch(workplace.write_run(), "train", TWO_NODES, *ON_SLURM)
    wait_until(lambda: count_steps(workplace.root / "out-run") >= 5, "step 5")
    assert workplace.run("job", "cancel", handle).code == 0
    status = workplace.read_status(handle)
    assert (status["state"], status["attempt"]) == ("cancelled", 1)
    assert "stopped by Slurm: cancellation" in workplace.read_logs()
    answer = workplace.run("job", "cleanup", handle, "-o", "json")
    (leftover,) = answer.document["leftovers"]
    assert leftover["name"] == str(workplace.root / "out-run")
    assert leftover["remedy"] == f"rm -r {workplace.root / 'out-run'}"


def test_a_failed_job_has_its_class_rank_and_message(workplace: SlurmWorkplace) -> None:
    """The loss becomes infinite, which no restart fixes."""
    run_file = workplace.write_run(optimizer={"learning_rate": 1e30})
    handle = workplace.launch(run_file, "train", TWO_NODES, *ON_SLURM)
    answer = workplace.run("job", "wait", handle, "-o", "json", "--timeout", "480")
    assert answer.code == 66, answer.error + workplace.read_logs()
    status = workplace.read_status(handle)
    assert (status["state"], status["exit_code"], status["attempt"]) == ("failed", 66, 1)
    assert status["failure"]["kind"] == "values"
    assert status["failure"]["rank"] in (0, 1)
    assert status["failure"]["message"]


def test_a_run_file_without_data_fails_with_its_message(workplace: SlurmWorkplace) -> None:
    run_file = workplace.write_run(data={"path": str(workplace.root / "nothing")})
    handle = workplace.launch(run_file, "train", *ON_SLURM)
    answer = workplace.run("job", "wait", handle, "--timeout", "480")
    assert answer.code == workplace.read_status(handle)["exit_code"] != 0
    assert "nothing" in workplace.read_status(handle)["failure"]["message"]


def test_a_job_runs_in_a_folder_whose_name_has_percent_signs(
    cluster: SlurmCluster, data: Path, tmp_path: Path
) -> None:
    """The output folder is relative, so Slurm puts the working folder before the logs."""
    root = tmp_path / "50%j 100%"
    root.mkdir()
    workplace = SlurmWorkplace(root, data, cluster=cluster)
    run_file = workplace.write_run(output={"folder": "out-run"}, stop={"steps": 3})
    handle = workplace.launch(run_file, "train", *ON_SLURM)
    assert workplace.wait_for_success(handle)["progress"]["step"] == 3
    assert list((root / "out-run.slurm").glob("*-1-0.log"))


def test_secrets_reach_the_nodes_and_nothing_else(
    workplace: SlurmWorkplace, cluster: SlurmCluster
) -> None:
    value = f"value{os.urandom(8).hex()}"
    secret = workplace.root / "secret"
    secret.write_text(value + "\n")
    launch = {"secrets": {"MY_TOKEN": f"file:{secret}"}, "labels": {"team": "search"}}
    run_file = write_launched(workplace, launch)
    handle = workplace.launch(run_file, "train", *ON_SLURM)
    wait_until(lambda: count_steps(workplace.root / "out-run") >= 5, "step 5")
    environments = [
        Path(f"/proc/{pid}/environ").read_bytes() for pid in cluster.list_node_pids(NODES[0])
    ]
    assert any(f"MY_TOKEN={value}\0".encode() in text for text in environments)
    assert "label.team=search" in workplace.show(handle)
    assert value not in workplace.show(handle)
    assert workplace.run("job", "cancel", handle).code == 0
    secret.unlink()
    for root in (workplace.root, cluster.root):
        for path in root.rglob("*"):
            if path.is_file() and not path.is_symlink():
                assert value.encode() not in path.read_bytes(), path


def test_bad_input_creates_nothing(
    workplace: SlurmWorkplace, cluster: SlurmCluster, tmp_path: Path
) -> None:
    run_file = write_launched(workplace, {"target": [{"kind": "slurm", "partition": "hihg"}]})
    command = ("launch", str(run_file), "train", *ON_SLURM)
    answer = workplace.run(*command)
    assert answer.code == 2
    assert "the cluster has no partition 'hihg'; set partition of the target" in answer.error
    target = {"kind": "slurm", "partition": "grace"}
    write_launched(workplace, {"target": [target], "hours": 1.5})
    answer = workplace.run(*command)
    assert answer.code == 2
    assert (
        "launch.hours is above the limit of partition grace; set it to at most 1:" in answer.error
    )
    target = {"kind": "slurm", "options": {"nodelist": "nowhere"}}
    write_launched(workplace, {"target": [target]})
    answer = workplace.run(*command)
    assert answer.code == 2
    assert "'sbatch' failed: sbatch: error:" in answer.error
    assert not list(tmp_path.glob("*.slurm"))
    assert cluster.run("squeue", "--noheader") == ""


@pytest.mark.parametrize(
    ("handle", "message"),
    [
        ("slurm://elsewhere/1", "is a job of another cluster; this machine reaches"),
        ("slurm://{name}/99999", "Slurm does not know job 99999"),
        ("slurm://{name}/one", "is not a Slurm job handle"),
    ],
)
def test_a_handle_of_another_cluster_or_job_is_refused(
    workplace: SlurmWorkplace, cluster: SlurmCluster, handle: str, message: str
) -> None:
    for action in ("status", "logs", "cancel", "cleanup", "events", "wait"):
        answer = workplace.run("job", action, handle.format(name=cluster.name))
        assert answer.code == 2
        assert message in answer.error
        assert len(answer.error.splitlines()) == 1


def test_an_unreachable_controller_is_transient(
    workplace: SlurmWorkplace, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (cluster.root / "slurm.conf").read_text()
    path = workplace.root / "slurm.conf"
    port = f"SlurmctldPort={find_free_port()}"
    path.write_text(re.sub(r"SlurmctldPort=\d+", port, text) + "MessageTimeout=2\n")
    environment = {**cluster.environment, "SLURM_CONF": str(path)}
    with monkeypatch.context() as patch:
        patch.setattr(SlurmCluster, "environment", environment)
        for command in (
            ("launch", str(workplace.write_run()), "train", *ON_SLURM),
            ("job", "status", f"slurm://{cluster.name}/1"),
        ):
            answer = workplace.run(*command)
            assert answer.code == 75, answer.error
            assert "cannot reach the server" in answer.error
    assert not list(workplace.root.glob("*.slurm"))
