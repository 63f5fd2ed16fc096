"""Jobs of simulated nodes with small programs: restarts, limits, arrays, cancellation, handles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launch.training_jobs import wait_until
from regauge.jobs.targets import Handle, JobSpec, JobStatus, LogRequest, _job_runner
from regauge.jobs.targets._local_job import JobFolder, build_node_commands
from regauge.jobs.targets._server_spec import ServerSpec
from regauge.jobs.targets.local import LocalNodes
from regauge.system.errors import ChildError, RegaugeError, SettingsError

COUNT = """
import os, pathlib, sys
file = pathlib.Path("starts")
starts = len(file.read_text()) if file.exists() else 0
with file.open("a") as stream:
    stream.write("x")
print("start", starts + 1, flush=True)
"""
"""Program that counts how often it was started, in the variable `starts`."""
WAIT = """
import os, time
def wait(name):
    while not os.path.exists(name):
        time.sleep(0.02)
"""
"""Function of a program that waits for a file, which the test creates."""
MEET = """
import os, signal, socket, sys, time
host, port = os.environ["PET_RDZV_ENDPOINT"].split(":")
names = ("PET_NNODES", "PET_RDZV_ID", "PET_RDZV_BACKEND")
print(*(os.environ[name] for name in names), port, flush=True)
def serve():
    server = socket.create_server((host, int(port)))
    server.settimeout(30)
    return server
def join():
    return socket.create_connection((host, int(port)), timeout=30)
try:
    server = serve()
except OSError:
    server = None
"""
"""Program of a node: node 0 serves the rendezvous, because it starts first."""


@dataclass
class Cluster:
    """Jobs in a folder; their nodes work in another folder."""

    root: Path
    handles: list[Handle] = field(default_factory=list)

    @property
    def launcher(self) -> LocalNodes:
        return LocalNodes(folder=str(self.root / "jobs"))

    def submit(self, program: str, **fields: Any) -> Handle:
        """Submit a Python program as the command of every node."""
        command = (sys.executable, "-c", textwrap.dedent(program))
        values: dict[str, Any] = {"name": "job", "min_nodes": 1, "max_nodes": 1, **fields}
        job = JobSpec(verb="train", command=command, processes=1, **values)
        handle = self.launcher.submit(self.launcher.plan(job))
        self.handles.append(handle)
        return handle

    def wait(self, handle: Handle, *states: str) -> JobStatus:
        """Wait until a job has ended, or is in one of some states; return its status."""

        def has_state() -> bool:
            status = self.launcher.find_status(handle)
            return status.state in states or (status.is_final and not states)

        wait_until(has_state, f"a state of {states}")
        return self.launcher.find_status(handle)

    def list_node_states(self, handle: Handle) -> list[str]:
        return [node.state for node in self.launcher.find_status(handle).nodes]

    def read_log(self, handle: Handle, **request: Any) -> list[str]:
        return list(self.launcher.read_log(handle, LogRequest(**request)))


def find_job_folder(handle: Handle) -> Path:
    return Path("/") / handle.job_id


def read_events(handle: Handle) -> list[dict[str, Any]]:
    return JobFolder(find_job_folder(handle)).read_events()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    cluster = Cluster(tmp_path)
    yield cluster
    for handle in cluster.handles:
        for action in (cluster.launcher.cancel, cluster.launcher.clean_up):
            try:
                action(handle)
            except RegaugeError:
                continue


@pytest.mark.parametrize("code", [1, 2, 64, 66, 67, 130])
def test_a_job_ends_with_the_exit_code_of_its_command(cluster: Cluster, code: int) -> None:
    handle = cluster.submit(f"import sys; print('hello'); sys.exit({code})")
    status = cluster.wait(handle)
    assert (status.state, status.exit_code, status.attempt) == ("failed", code, 1)
    assert "its exit code allows no restart" in status.reason
    assert cluster.read_log(handle) == ["hello"]
    assert [node.exit_code for node in status.nodes] == [code]
    assert status.submitted_at <= status.started_at <= status.finished_at  # type: ignore[operator]


@pytest.mark.parametrize(
    "end", ["sys.exit(75)", "sys.exit(76)", "sys.exit(143)", "os.kill(os.getpid(), 9)"]
)
def test_a_lost_node_starts_again(cluster: Cluster, end: str) -> None:
    handle = cluster.submit(f"{COUNT}\nif not starts:\n    {end}")
    status = cluster.wait(handle)
    assert (status.state, status.exit_code, status.attempt) == ("succeeded", 0, 2)
    states = [event.get("state") for event in read_events(handle)]
    assert ("preempted" if "143" in end else "restarting") in states
    assert cluster.read_log(handle) == ["start 2"]
    assert cluster.read_log(handle, attempt=1) == ["start 1"]


def test_attempts_are_limited(cluster: Cluster) -> None:
    handle = cluster.submit(f"{COUNT}\nsys.exit(75)", max_attempts=2)
    status = cluster.wait(handle)
    assert (status.state, status.exit_code, status.attempt) == ("failed", 75, 2)
    assert "it has no attempt left" in status.reason
    assert Path("starts").read_text() == "xx"


def test_a_time_limit_stops_a_job(cluster: Cluster) -> None:
    status = cluster.wait(cluster.submit("import time; time.sleep(60)", hours=0.5 / 3600))
    assert (status.state, status.exit_code) == ("failed", 67)
    assert "the time limit of" in status.reason


def test_a_job_is_cancelled_once(cluster: Cluster) -> None:
    handle = cluster.submit("import time; time.sleep(60)")
    cluster.wait(handle, "running")
    with pytest.raises(SettingsError, match="stop it first: regauge job cancel local://"):
        cluster.launcher.clean_up(handle)
    cluster.launcher.cancel(handle)
    status = cluster.launcher.find_status(handle)
    assert (status.state, status.nodes[0].state) == ("cancelled", "cancelled")
    with pytest.raises(SettingsError, match=r"has ended already \(cancelled\)"):
        cluster.launcher.cancel(handle)
    assert cluster.launcher.clean_up(handle) == []
    with pytest.raises(SettingsError, match="no job local://"):
        cluster.launcher.find_status(handle)


def test_a_node_that_ignores_a_stop_is_killed(cluster: Cluster) -> None:
    program = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", flush=True)
    time.sleep(60)
    """
    handle = cluster.submit(program)
    cluster.wait(handle, "running")
    wait_until(lambda: bool(cluster.read_log(handle)), "the first line")
    cluster.launcher.cancel(handle)
    status = cluster.launcher.find_status(handle)
    assert (status.state, status.nodes[0].exit_code) == ("cancelled", 137)


def test_a_job_outlives_the_process_that_launched_it(cluster: Cluster) -> None:
    code = f"""
    import os, sys, time
    from regauge.jobs.targets import JobSpec
    from regauge.jobs.targets.local import LocalNodes
    program = {WAIT + "wait('go'); print('end')"!r}
    job = JobSpec("job", "train", (sys.executable, "-c", program), 1, 1, 1)
    launcher = LocalNodes(folder={str(cluster.root / "jobs")!r})
    print(launcher.submit(launcher.plan(job)), flush=True)
    time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    handle = Handle.parse(process.stdout.readline().strip())
    cluster.handles.append(handle)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert cluster.launcher.find_status(handle).state == "running"
    Path("go").touch()
    assert cluster.wait(handle).state == "succeeded"
    assert cluster.read_log(handle) == ["end"]


def test_the_state_is_unknown_if_the_scheduler_dies(cluster: Cluster) -> None:
    handle = cluster.submit(
        "import os, time; print(os.getppid(), os.getpid(), flush=True); time.sleep(60)"
    )
    cluster.wait(handle, "running")
    wait_until(lambda: bool(cluster.read_log(handle)), "the first line")
    scheduler, node = map(int, cluster.read_log(handle)[0].split())
    os.kill(scheduler, signal.SIGKILL)
    status = cluster.wait(handle, "unknown")
    assert "has died" in status.reason
    assert status.nodes[0].state == "unknown"
    wait_until(lambda: not Path(f"/proc/{node}").exists(), "the end of the node")
    with pytest.raises(SettingsError, match=r"has ended already \(unknown\)"):
        cluster.launcher.cancel(handle)
    assert cluster.launcher.clean_up(handle) == []


def test_a_taken_name_is_refused_and_the_job_goes_on(cluster: Cluster) -> None:
    handle = cluster.submit(f"{WAIT}wait('go')")
    with pytest.raises(SettingsError, match="a job named 'job' exists: local://") as caught:
        cluster.submit("print('other')")
    assert f"regauge job cleanup {handle}" in caught.value.remedy
    assert read_events(handle)
    assert [path.name for path in (cluster.root / "jobs").iterdir()] == ["job"]
    Path("go").touch()
    assert cluster.wait(handle).state == "succeeded"


def test_a_command_that_cannot_start_fails_the_job(cluster: Cluster) -> None:
    job = JobSpec("job", "train", ("/none/program",), 1, 1, 1)
    handle = cluster.launcher.submit(cluster.launcher.plan(job))
    cluster.handles.append(handle)
    status = cluster.wait(handle)
    assert (status.state, status.exit_code) == ("failed", 1)
    assert "No such file or directory: '/none/program'" in status.reason


def test_jobs_of_an_array_are_independent(cluster: Cluster) -> None:
    program = """
    import os, sys
    index = int(os.environ["JOB_COMPLETION_INDEX"])
    print("job", index)
    sys.exit(64 if index == 1 else 0)
    """
    handle = cluster.submit(program, jobs=3)
    status = cluster.wait(handle)
    assert (status.state, status.exit_code) == ("failed", 64)
    assert [node.state for node in status.nodes] == ["succeeded", "failed", "succeeded"]
    assert [cluster.read_log(handle, rank=rank) for rank in range(3)] == [
        [f"job {n}"] for n in range(3)
    ]


def test_a_lost_job_of_an_array_starts_again_alone(cluster: Cluster) -> None:
    program = """
    import os, pathlib, sys
    index = os.environ["JOB_COMPLETION_INDEX"]
    mark = pathlib.Path(index)
    is_first = not mark.exists()
    mark.touch()
    sys.exit(75 if is_first and index == "1" else 0)
    """
    status = cluster.wait(cluster.submit(program, jobs=2))
    assert (status.state, status.attempt) == ("succeeded", 2)
    attempts = {
        (event["node"], event["attempt"])
        for event in read_events(cluster.handles[0])
        if event.get("node_state") == "running"
    }
    assert attempts == {(0, 1), (1, 1), (1, 2)}


def read_rendezvous(cluster: Cluster, handle: Handle, attempt: int, node: int) -> list[str]:
    """Return the number of nodes, the name, the backend and the port that a node got."""
    return cluster.read_log(handle, attempt=attempt, rank=node)[0].split()


def test_the_nodes_of_a_gang_meet_and_a_lost_one_joins_again(cluster: Cluster) -> None:
    program = f"""{MEET}
if server:
    server.accept(), server.accept()
else:
    join()
    if not os.path.exists("lost"):
        open("lost", "w").close()
        os.kill(os.getpid(), 9)
"""
    handle = cluster.submit(program, min_nodes=2, max_nodes=2)
    status = cluster.wait(handle)
    assert (status.state, status.attempt) == ("succeeded", 2)
    first = read_rendezvous(cluster, handle, 1, 0)
    assert first[:3] == ["2", "job-1", "c10d"]
    assert read_rendezvous(cluster, handle, 1, 1) == first
    assert read_rendezvous(cluster, handle, 2, 1) == first, "node 0 still serves it"
    with pytest.raises(SettingsError, match="no log of rank 0 in attempt 2"):
        read_rendezvous(cluster, handle, 2, 0)


def test_all_nodes_start_again_without_the_leader(cluster: Cluster) -> None:
    program = f"""{MEET}
is_first = not os.path.exists("lost")
if not server:
    join()
    if is_first:
        time.sleep(60)
else:
    server.accept()
    if is_first:
        open("lost", "w").close()
        os.kill(os.getpid(), 9)
"""
    handle = cluster.submit(program, min_nodes=2, max_nodes=2)
    status = cluster.wait(handle)
    assert (status.state, status.attempt) == ("succeeded", 2)
    names = [
        read_rendezvous(cluster, handle, attempt, node)[1] for attempt in (1, 2) for node in (0, 1)
    ]
    assert names == ["job-1", "job-1", "job-2", "job-2"]


def test_an_elastic_job_continues_without_a_node(cluster: Cluster) -> None:
    program = f"""{MEET}{WAIT}
if server:
    server.accept()
    wait("go")
else:
    join()
    sys.exit(75)
"""
    handle = cluster.submit(program, min_nodes=1, max_nodes=2, max_attempts=1)
    wait_until(lambda: "failed" in cluster.list_node_states(handle), "the loss of node 1")
    Path("go").touch()
    status = cluster.wait(handle)
    assert status.state == "succeeded"
    assert [node.exit_code for node in status.nodes] == [0, 75]
    assert read_rendezvous(cluster, handle, 1, 1)[0] == "1:2"


def test_the_job_fails_with_the_node_that_failed(cluster: Cluster) -> None:
    program = f"""{MEET}
if server:
    server.accept()
    time.sleep(60)
else:
    join()
    print("regauge: a bad row; correct it", file=sys.stderr)
    sys.exit(64)
"""
    handle = cluster.submit(program, min_nodes=2, max_nodes=2)
    status = cluster.wait(handle)
    assert (status.state, status.exit_code, status.attempt) == ("failed", 64, 1)
    assert status.failure is not None
    assert (status.failure.node, status.failure.message) == (1, "regauge: a bad row; correct it")


def test_the_variables_of_an_outer_scheduler_do_not_reach_a_node(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "PET_NNODES", "SLURM_JOB_ID", "AWS_BATCH_JOB_ID"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("KEEP", "1")
    program = """
    import os
    names = {"RANK", "PET_NNODES", "SLURM_JOB_ID", "AWS_BATCH_JOB_ID", "KEEP", "ADDED"}
    print(sorted(names & set(os.environ)))
    """
    handle = cluster.submit(program, environment={"ADDED": "2"})
    assert cluster.wait(handle).state == "succeeded"
    assert cluster.read_log(handle) == ["['ADDED', 'KEEP']"]


def test_a_secret_is_read_by_the_job_and_written_nowhere(cluster: Cluster) -> None:
    file = cluster.root / "secret"
    file.write_text("classified-value\n")
    program = "import os; print(len(os.environ['API_SECRET']))"
    handle = cluster.submit(program, secrets={"API_SECRET": f"file:{file}"})
    assert cluster.wait(handle).state == "succeeded"
    assert cluster.read_log(handle) == [str(len("classified-value"))]
    texts = [path.read_text() for path in find_job_folder(handle).rglob("*") if path.is_file()]
    assert texts
    assert not [text for text in texts if "classified" in text]


def test_a_missing_secret_leaves_nothing_behind(cluster: Cluster) -> None:
    problem = r"launch\.secrets\.API_SECRET cannot be read from /none on this node"
    with pytest.raises(ChildError, match=problem) as caught:
        cluster.submit("pass", secrets={"API_SECRET": "file:/none"})
    assert caught.value.exit_code == 64
    assert not list((cluster.root / "jobs").iterdir())


def test_a_reference_of_another_target_is_refused_without_its_value(cluster: Cluster) -> None:
    with pytest.raises(SettingsError) as caught:
        cluster.submit("pass", secrets={"API_SECRET": "classified/key"})
    assert "launch.secrets.API_SECRET" in str(caught.value)
    assert "classified" not in str(caught.value)


def test_a_log_is_followed_to_the_end_of_the_job(cluster: Cluster) -> None:
    program = f"""{WAIT}
for n in range(3):
    print("line", n, flush=True)
    wait(f"seen-{{n + 1}}")
print("no end", end="")
"""
    handle = cluster.submit(program)
    wait_until(lambda: any(find_job_folder(handle).glob("logs/*/*")), "the log")
    lines = []
    for line in cluster.launcher.read_log(handle, LogRequest(follow=True)):
        lines.append(line)
        Path(f"seen-{len(lines)}").touch()
    assert lines == [*(f"line {n}" for n in range(3)), "no end"]
    assert cluster.launcher.find_status(handle).is_final


def test_a_missing_log_names_the_logs_that_exist(cluster: Cluster) -> None:
    handle = cluster.submit("print('x')")
    cluster.wait(handle)
    with pytest.raises(SettingsError, match=r"no log of rank 3; known logs: attempt-1/node-0.log"):
        cluster.read_log(handle, rank=3)


DRAIN = """
import signal, sys, time
def drain(*_):
    time.sleep(1.0)
    print("drained", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""
"""Program that completes its requests for a second after SIGTERM."""


@pytest.mark.parametrize(("drain_seconds", "last"), [(60.0, "drained"), (0.0, "ready")])
def test_a_stopped_server_drains_before_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drain_seconds: float, last: str
) -> None:
    monkeypatch.setattr(_job_runner, "GRACE_SECONDS", 0.2)
    server = ServerSpec(8080, 1.0, drain_seconds)
    job = JobSpec("qa", "serve", (sys.executable, "-c", DRAIN), 1, 1, 1, server=server)
    commands = partial(build_node_commands, job)
    runner = _job_runner.JobRunner(job, commands, tmp_path, os.environ)
    log = _job_runner.build_log_path(tmp_path, 1, 0)
    runner.run(lambda: runner.cancel() if "ready" in log.read_text() else None)
    assert runner.state == "cancelled"
    assert log.read_text().split()[-1] == last


def test_replicas_of_a_server_do_not_share_a_port(cluster: Cluster) -> None:
    job = JobSpec("qa", "serve", ("regauge",), 1, 1, 1, jobs=2, server=ServerSpec(8080, 1.0, 1.0))
    plan = cluster.launcher.plan(job)
    assert plan.documents[0].content["job"]["jobs"] == 1
    assert any("One replica runs" in note for note in plan.notes)
