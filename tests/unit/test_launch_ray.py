"""Documents of Ray jobs, and the driver that runs their nodes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from regauge.jobs.targets import Handle, JobSpec, LaunchPlan, LeaderAddress, Machine, _ray_driver
from regauge.jobs.targets._ray_driver import (
    Driver,
    DriverOptions,
    find_attempt_code,
    format_event,
    format_line,
    read_events,
    read_lines,
)
from regauge.jobs.targets._ray_node import NodeActor
from regauge.jobs.targets._secret_files import read_secret_files
from regauge.jobs.targets.ray import RayCluster, build_status
from regauge.system.errors import SettingsError
from regauge.system.timing import wait_for

START_SECONDS = 30.0

GOLDEN = Path(__file__).parent / "golden"
MACHINE = Machine("p5.48xlarge", "H100", "NVIDIA", 8, 32, 192, 2048, 55.04, "2026-07-20")
JOB = JobSpec(
    name="llama",
    verb="train",
    command=("/opt/python", "-m", "regauge", "train", "/runs/llama.toml", "seed=3"),
    min_nodes=2,
    max_nodes=2,
    processes=8,
    machine=MACHINE,
    environment={"HF_HOME": "/cache"},
    secrets={"WANDB_API_KEY": "file:/etc/secrets/wandb"},
    hours=12.0,
    output="out/llama",
    labels={"team": "search"},
)
CLUSTER = RayCluster(address="10.0.0.4:8265", gpus=8)


def split_entrypoint(plan: LaunchPlan) -> list[str]:
    return list(plan.commands[0][plan.commands[0].index("--") + 1 :])


def test_the_documents_equal_the_golden_file() -> None:
    plan = CLUSTER.plan(JOB)
    assert plan.documents[0].text == (GOLDEN / "ray_train.json").read_text()
    assert CLUSTER.plan(JOB) == plan
    assert json.loads(plan.documents[0].text)["entrypoint"].endswith(
        "-- /opt/python -m regauge train /runs/llama.toml seed=3"
    )
    assert "--submission-id" in plan.commands[0]


def test_a_prediction_gets_an_executor_with_a_worker_per_node() -> None:
    command = ("/opt/python", "-m", "regauge", "predict", "/runs/embed.toml")
    job = replace(JOB, verb="predict", command=command, processes=1)
    words = split_entrypoint(RayCluster(gpus=1, resources={"slot": 1.0}).plan(job))
    assert words[-1] == (
        'execution.executor={kind = "ray", workers = 2, cpus = 1, gpus = 1, resources = {slot = 1}}'
    )
    assert words[words.index("--nodes") + 1] == "0"
    other = replace(job, command=(*command, "execution.executor=inline"))
    assert split_entrypoint(RayCluster().plan(other))[-1] == "execution.executor=inline"


def test_a_copied_folder_makes_the_run_file_relative(tmp_path: Path) -> None:
    command = ("/opt/python", "-m", "regauge", "train", str(tmp_path / "a" / "run.toml"))
    plan = RayCluster(working_dir=str(tmp_path)).plan(replace(JOB, command=command))
    assert split_entrypoint(plan)[-5:] == ["python", "-m", "regauge", "train", "a/run.toml"]
    assert plan.documents[0].content["runtime_env"]["working_dir"] == str(tmp_path)
    with pytest.raises(SettingsError, match="not in working_dir"):
        RayCluster(working_dir=str(tmp_path / "b")).plan(replace(JOB, command=command))


def test_a_secret_that_is_no_reference_is_refused() -> None:
    with pytest.raises(SettingsError, match="set it to file:/path"):
        CLUSTER.plan(replace(JOB, secrets={"TOKEN": "hf_value"}))


def test_a_rehearsal_gets_the_commands_of_the_documents() -> None:
    commands = CLUSTER.list_node_commands(CLUSTER.plan(JOB), LeaderAddress("10.0.0.4", 29400, "a"))
    assert [command.index for command in commands] == [0, 1]
    assert commands[0].command == JOB.command
    assert commands[1].environment["PET_RDZV_ENDPOINT"] == "10.0.0.4:29400"
    assert commands[1].environment["PET_NNODES"] == "2"
    assert commands[1].environment["HF_HOME"] == "/cache"


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([75, 143], 75), ([143, 2], 2), ([None, 1], 75), ([0, 75], 75)],
)
def test_the_code_of_an_attempt(codes: list[int | None], code: int) -> None:
    assert find_attempt_code(codes) == code


@pytest.fixture
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll the commands of jobs often."""
    monkeypatch.setattr(_ray_driver, "REMOTE_POLL_SECONDS", 0.05)


def run_driver(program: str, *options: str, stop_file: Path | None = None) -> int:
    """Run a program as the command of a job; return its exit code.

    The job is stopped when the program has written `stop_file`.
    """
    words = ["--name", "job", "--nodes", "0", *options, "--", sys.executable, "-c", program]
    driver = Driver(DriverOptions.parse(words))
    if stop_file is None:
        return driver.run()

    def stop() -> None:
        if wait_for(stop_file.exists, START_SECONDS, poll_seconds=0.05):
            driver.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    code = driver.run()
    thread.join()
    return code


@pytest.mark.usefixtures("_fast")
def test_a_code_of_the_restart_list_starts_the_command_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "attempts"
    program = f"import sys; f = open({str(path)!r}, 'a+'); f.write('x'); f.seek(0); f.flush(); "
    program += "n = len(f.read()); print('attempt', n); sys.exit(75 if n < 3 else 0)"
    code = run_driver(program, "--max-attempts", "3")
    log = capsys.readouterr().out
    assert code == 0
    assert [line.text for line in read_lines(log)] == [
        "attempt 1",
        "attempt 2",
        "attempt 3",
    ]
    states = [event["state"] for event in read_events(log)]
    assert states.count("restarting") == 2


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize(("code", "attempts"), [(75, 2), (2, 1), (1, 1), (0, 1)])
def test_the_number_of_attempts(
    code: int, attempts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_driver(f"raise SystemExit({code})", "--max-attempts", "2") == code
    events = read_events(capsys.readouterr().out)
    assert events[-1]["attempt"] == attempts


@pytest.mark.usefixtures("_fast")
def test_a_stopped_job_passes_the_signal_on_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "started"
    program = (
        "import signal, sys, time; signal.signal(15, lambda *a: sys.exit(143)); "
        f"open({str(path)!r}, 'w'); time.sleep(60)"
    )
    code = run_driver(program, "--max-attempts", "5", stop_file=path)
    assert code == 143
    assert len([e for e in read_events(capsys.readouterr().out) if e.get("hosts")]) == 1


@pytest.mark.usefixtures("_fast")
def test_a_command_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "started"
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); "
    program += f"open({str(path)!r}, 'w'); time.sleep(60)"
    code = run_driver(program, "--grace-seconds", "0.5", stop_file=path)
    assert code == 128 + signal.SIGKILL


@pytest.mark.usefixtures("_fast")
def test_the_time_limit_ends_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_driver("import time; time.sleep(60)", "--hours", "0.0003")
    assert code == 67
    assert "time limit" in read_events(capsys.readouterr().out)[-1]["message"]


def test_a_command_that_does_not_exist_is_reported() -> None:
    node = NodeActor()
    node.start(["/no/python"], {}, {})
    lines, code = node.poll()
    assert code == 127
    assert lines[0].startswith("regauge: /no/python cannot start here: No such file")


def test_secrets_are_read_where_the_command_starts(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("value\n")
    assert read_secret_files({"TOKEN": f"file:{path}"}) == {"TOKEN": "value"}
    node = NodeActor()
    node.start([sys.executable], {}, {"TOKEN": "file:/no/file"})
    assert node.poll()[1] == 64


def test_the_log_holds_events_and_lines() -> None:
    log = "\n".join(
        [format_event({"state": "running"}), "noise", format_line(2, 1, "[a] b"), "[event] {x"]
    )
    assert read_events(log) == [{"state": "running"}]
    assert list(read_lines(log)) == [(2, 1, "[a] b")]


EVENTS: list[dict[str, Any]] = [
    {"time": "t1", "state": "starting", "attempt": 1, "message": "waiting"},
    {"time": "t2", "state": "running", "attempt": 1, "hosts": ["a", "b"], "message": "2 nodes"},
    {"time": "t3", "state": "running", "attempt": 1, "node": 1, "message": "node 1 was lost"},
    {"time": "t4", "state": "restarting", "attempt": 1, "message": "exit code 75"},
    {"time": "t5", "state": "starting", "attempt": 2, "message": "waiting for 2"},
]


@pytest.mark.parametrize(
    ("status", "count", "state", "reason"),
    [
        ("PENDING", 0, "pending", "no node has 4 CPUs"),
        ("RUNNING", 0, "starting", ""),
        ("RUNNING", 1, "starting", "waiting"),
        ("RUNNING", 2, "running", "2 nodes"),
        ("RUNNING", 4, "restarting", "exit code 75"),
        ("RUNNING", 5, "starting", "waiting for 2"),
        ("STOPPED", 5, "cancelled", "no node has 4 CPUs"),
        ("FAILED", 5, "failed", "no node has 4 CPUs"),
        ("SUCCEEDED", 5, "succeeded", "no node has 4 CPUs"),
    ],
)
def test_the_state_of_a_job(status: str, count: int, state: str, reason: str) -> None:
    info = SimpleNamespace(
        status=status,
        message="no node has 4 CPUs",
        metadata={"usd_per_hour": "110.08", "price_date": "2026-07-20", "output": "out"},
        driver_exit_code=75,
        start_time=1_790_000_000_000,
        end_time=None,
    )
    log = "\n".join(map(format_event, EVENTS[:count]))
    answer = build_status(Handle("ray", "a:1", "job"), info, log)
    assert (answer.state, answer.reason) == (state, reason)
    assert (answer.usd_per_hour, answer.price_date) == (110.08, "2026-07-20")
    assert answer.shell_command == ("ssh a" if state == "running" else "")
    assert answer.submitted_at == "2026-09-21T14:13:20.000+00:00"
    if count >= 4:
        assert [node.state for node in answer.nodes][1] == "failed"
    if state == "failed":
        assert (answer.exit_code, answer.failure is not None) == (75, True)


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: not proved")
def test_an_unreachable_cluster_ends_with_code_75() -> None:
    command = [sys.executable, "-m", "regauge", "job", "status", "ray://127.0.0.1:9/job"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 75
    assert "no Ray job server answers at 127.0.0.1:9" in process.stderr
    assert "; check the address" in process.stderr
