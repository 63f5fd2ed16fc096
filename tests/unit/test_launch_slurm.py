"""The target 'slurm': its job script, its settings, and the reading of Slurm's records."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regauge.commands.job import describe_status
from regauge.jobs.lints import run_lints
from regauge.jobs.targets import Handle, JobSpec, LaunchPlan, LeaderAddress, Machine, _slurm_client
from regauge.jobs.targets._slurm_jobs import (
    build_comment,
    parse_comment,
    parse_records,
    parse_table,
)
from regauge.jobs.targets._slurm_logs import LogFolder
from regauge.jobs.targets._slurm_script import TEMPLATE
from regauge.jobs.targets._slurm_status import build_status, describe_reason
from regauge.jobs.targets.slurm import USED, Slurm
from regauge.system.errors import PreflightError, SettingsError
from regauge.system.timing import wait_for

BASH = shutil.which("bash") or "/bin/bash"
GOLDEN = Path(__file__).parent / "golden"
P4D = Machine("p4d.24xlarge", "A100-40GB", "NVIDIA", 8, 4, 96, 1152, 21.96, "2026-07-20")
HANDLE = Handle("slurm", "tiny", "7")


def build_spec(**changes: Any) -> JobSpec:
    """Return a job of two nodes."""
    command = ("/opt/venv/bin/python", "-m", "regauge", "train", "/data/run file.toml")
    spec = JobSpec("ranker", "train", command, 2, 2, 8, output="out/ranker")
    return dataclasses.replace(spec, **changes)


def build_array() -> JobSpec:
    command = ("/opt/venv/bin/python", "-m", "regauge", "predict", "/data/run.toml")
    return JobSpec("embed", "predict", (*command, "predict.job_count=3"), 1, 1, 1, jobs=3)


def render(job: JobSpec, **settings: Any) -> str:
    return Slurm(**settings).plan(job).documents[0].text


FULL: dict[str, Any] = {
    "partition": "gpu,long",
    "account": "team",
    "qos": "high",
    "constraint": "a100&ib",
    "reservation": "night",
    "gres": "gpu:a100:8",
    "cpus": 96,
    "grace_seconds": 300,
    "setup": ("module load cuda", '[[ $REGAUGE_ATTEMPT -gt 1 ]] || echo "first attempt"'),
    "options": {"mail-user": "me@example.org", "nice": 100, "overcommit": True},
    "logs": "/shared/my logs",
}
SCRIPTS: dict[str, tuple[JobSpec, dict[str, Any]]] = {
    "train": (
        build_spec(
            machine=P4D,
            hours=24.0,
            environment={"HF_HOME": "/data/hf $cache"},
            secrets={"HF_TOKEN": "file:/etc/my token"},
            labels={"team": "search & ranking"},
        ),
        FULL,
    ),
    "elastic": (build_spec(min_nodes=1, max_nodes=4, max_attempts=5), {}),
    "array": (build_array(), {"cpus": 4, "requeue": "never", "grace_seconds": 0}),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_is_the_golden_one_around_its_functions(name: str) -> None:
    job, settings = SCRIPTS[name]
    path = GOLDEN / f"slurm-{name}.sh"
    functions = re.findall("{% raw %}\n(.*){% endraw %}", TEMPLATE.read_text(), re.DOTALL)[0]
    before, after = render(job, **settings).split(functions)
    text = f"{before}# The functions of the template.\n{after}"
    if "REGAUGE_WRITE_GOLDEN" in os.environ:
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_passes_shellcheck(name: str) -> None:
    job, settings = SCRIPTS[name]
    command = [str(Path(sys.executable).with_name("shellcheck")), "--severity=style", "-"]
    text = render(job, **settings)
    process = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout


CHANGES: dict[str, Any] = {
    "min_nodes": 1,
    "max_nodes": 3,
    "processes": 3,
    "machine": P4D,
    "environment": {"NAME": "value"},
    "secrets": {"TOKEN": "file:/etc/token"},
    "max_attempts": 7,
    "hours": 3.0,
    "labels": {"team": "search"},
    "jobs": 3,
    "verb": "evaluate",
    "name": "other",
    "output": "out/other",
    "command": ("regauge", "train", "other.toml"),
}
READ_BY_THE_RUN = {"verb", "rendezvous", "rendezvous_endpoint", "accelerator"}
"""Fields that the command or the run file contains already."""


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(JobSpec)])
def test_every_field_changes_the_script_or_is_not_used(field: str) -> None:
    if field in READ_BY_THE_RUN:
        return
    if field not in CHANGES:
        assert field not in USED
        return
    job = build_spec(min_nodes=1, max_nodes=1) if field == "jobs" else build_spec()
    assert render(dataclasses.replace(job, **{field: CHANGES[field]})) != render(job)


@pytest.mark.parametrize("field", Slurm.model_fields)
def test_every_setting_of_the_target_changes_the_script(field: str) -> None:
    changes = {**FULL, "requeue": "never"}
    job = build_spec(hours=1.0)
    assert render(job, **{field: changes[field]}) != render(job)


def test_no_value_of_a_secret_is_in_the_plan(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("hf_0123456789abcdef")
    text = render(build_spec(secrets={"HF_TOKEN": f"file:{secret}"}))
    assert "hf_0123456789abcdef" not in text
    assert f"read_secret HF_TOKEN {secret}" in text


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"secrets": {"A": "hf_abc"}}, {}, "launch.secrets.A is not a reference"),
        ({"jobs": 2}, {}, "launch.jobs is 2, and execution.nodes.count is 2; remove one of them"),
        ({}, {"options": {"nodes": 3}}, "launch.target.options has 'nodes', which Regauge sets"),
        ({}, {"options": {"wrap": "x"}}, "launch.target.options has 'wrap', which Regauge sets"),
    ],
)
def test_a_job_that_slurm_cannot_run_is_refused(
    changes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        render(build_spec(**changes), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": {"Mail": "x"}}, "'Mail' is not the long name of an option"),
        ({"options": {"nice": False}}, "nice has no value"),
        ({"options": {"nice": "1\n#SBATCH --uid=0"}}, "nice has no value"),
        ({"partition": "a\nb"}, "control characters"),
        ({"cpus": 0}, "greater than or equal to 1"),
        ({"requeue": "always"}, "'auto' or 'never'"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Slurm(**settings)


@pytest.mark.parametrize(
    ("hours", "text"),
    [(24.0, "24:00:00"), (0.5, "0:30:00"), (1 / 60, "0:01:00"), (1e-9, "0:00:01")],
)
def test_time_limits(hours: float, text: str) -> None:
    assert f"#SBATCH --time={text}\n" in render(build_spec(hours=hours))


PROGRAMS = {
    "srun": """
n=$(cat count 2>/dev/null || echo 0); n=$((n + 1)); echo "$n" >count
while [[ $1 == --* ]]; do shift; done
if [[ -e slow ]]; then
  sleep 30 & child=$!
  trap 'if [[ -e saving ]]; then rm saving; else kill $child; exit 143; fi' TERM
  echo $$ >pid
  while true; do wait $child; done
fi
read -r -a codes <codes
exit "${codes[$((n - 1))]}"
""",
    "scontrol": """
echo "scontrol $*" >>calls
if [[ $* == *" show job "* ]]; then cat record; fi
if [[ $* == requeue* ]]; then exit 0; fi
""",
    "sleep": 'if [[ $1 == 60 ]]; then exit 1; fi\nexec "$REAL_SLEEP" "$@"\n',
    "scancel": 'echo "scancel $*" >>calls\nif [[ $1 == --signal* ]]; then kill "$(<pid)"; fi\n',
}
START = 1700000000
RUNNING = (
    f"JobId=7 JobState=RUNNING Restarts=0 StartTime={START} EndTime=Unknown PreemptTime=None A=1"
)
"""As `SLURM_TIME_FORMAT=%s scontrol --oneliner show job` prints it, on a real Slurm 22.05."""
ENDED = RUNNING.replace("RUNNING", "COMPLETING").replace("Unknown", str(START + 37))
PREEMPTED = ENDED.replace("PreemptTime=None", f"PreemptTime={START + 37}")
LATER = 2**33
"""A time that is still to come, in seconds of the epoch."""


class ScriptRun:
    """A job script that runs with programs in place of Slurm's."""

    def __init__(self, folder: Path, script: str, codes: str) -> None:
        self.folder, self.output = folder, ""
        (folder / "bin").mkdir()
        for name, text in PROGRAMS.items():
            path = folder / "bin" / name
            path.write_text(f"#!/bin/bash{text}" if text[0] == "\n" else f"#!/bin/bash\n{text}")
            path.chmod(0o755)
        (folder / "codes").write_text(codes)
        (folder / "record").write_text(RUNNING)
        (folder / "logs").mkdir()
        (folder / "job.sh").write_text(script)
        self.environment = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "REAL_SLEEP": str(shutil.which("sleep")),
        }

    def start(self, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [BASH, "job.sh"],
            cwd=self.folder,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def stop(self, record: str, cancelled: str = "") -> tuple[int, str]:
        """Run the script, and send SIGTERM in the first step; return its code and its calls.

        With `cancelled`, the step saves until a second signal, for which Slurm has that record.
        """
        (self.folder / "slow").touch()
        process = self.start()
        assert wait_for(self.read_pid, 20, poll_seconds=0.02)
        (self.folder / "record").write_text(record)
        if cancelled:
            (self.folder / "saving").touch()
        process.terminate()
        if cancelled:
            assert wait_for(lambda: not (self.folder / "saving").exists(), 20, poll_seconds=0.02)
            record = cancelled
            (self.folder / "record").write_text(record)
            process.terminate()
        if "EndTime=17" in record:  # Slurm ended the job, and also signals the step
            os.kill(int(self.read_pid()), signal.SIGTERM)
        self.output, _ = process.communicate(timeout=30)
        return process.returncode, self.calls

    def read_pid(self) -> str:
        """Return the process of the step when it handles signals; empty before."""
        path = self.folder / "pid"
        return path.read_text() if path.exists() else ""

    @property
    def calls(self) -> str:
        path = self.folder / "calls"
        return path.read_text() if path.exists() else ""

    def read_log(self, suffix: str) -> str:
        path = self.folder / "logs" / f"7.{suffix}"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., ScriptRun]:
    """Return a function that creates a run of a script from the codes of its steps."""

    def create(codes: str, job: JobSpec | None = None, **settings: Any) -> ScriptRun:
        return ScriptRun(
            tmp_path, render(job or build_spec(), **{"logs": "logs", **settings}), codes
        )

    return create


@pytest.mark.parametrize(
    ("codes", "code", "steps", "requeues"),
    [
        ("0", 0, 1, 0),
        ("75 0", 0, 2, 0),
        ("143 75 0", 0, 3, 0),
        ("75 75 75", 75, 3, 0),
        ("64", 64, 1, 0),
        ("2", 2, 1, 0),
        ("137", 137, 1, 0),
        ("76", 76, 1, 1),
    ],
)
def test_the_exit_code_decides_whether_another_attempt_begins(
    run_script: Callable[..., ScriptRun], codes: str, code: int, steps: int, requeues: int
) -> None:
    run = run_script(codes)
    process = run.start()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == code, output
    assert (run.folder / "count").read_text() == f"{steps}\n"
    assert len((run.folder / "logs" / "7.attempts").read_text().splitlines()) == steps
    assert run.calls.count("scontrol requeue 7") == requeues


@pytest.mark.parametrize("logs", ["top 50%jobs/run %A", "100%", "%%j"])
def test_a_percent_sign_in_a_folder_is_no_pattern(
    logs: str, run_script: Callable[..., ScriptRun]
) -> None:
    """In file names of `sbatch` and `srun`, `%` begins a pattern and `%%` is a percent sign."""
    pattern = logs.replace("%", "%%")
    (option,) = re.findall("^#SBATCH --output=(.*)$", render(build_spec(), logs=logs), re.MULTILINE)
    assert option.strip('"') == f"{pattern}/%j.log"
    run = run_script("0", logs=logs)
    (run.folder / logs).mkdir(parents=True)
    (run.folder / "bin" / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@" >options\n')
    run.start().communicate(timeout=30)
    options = (run.folder / "options").read_text().splitlines()
    assert f"--output={pattern}/7-1-%n.log" in options
    assert (run.folder / logs / "7.attempts").exists()


def test_a_log_folder_with_a_backslash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm would not replace `%j`: all jobs would write to one file."""
    with pytest.raises(SettingsError, match="backslash"):
        render(build_spec(), logs="a\\b")
    (tmp_path / "a\\b").mkdir()
    monkeypatch.chdir(tmp_path / "a\\b")
    with pytest.raises(SettingsError, match="backslash"):
        render(build_spec())
    assert render(build_spec(), logs="/logs")


def test_a_working_folder_with_a_percent_sign_is_no_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm expands it in front of a relative path; then no log can be written (code 181)."""
    (tmp_path / "50%j").mkdir()
    monkeypatch.chdir(tmp_path / "50%j")
    assert f"#SBATCH --output={tmp_path}/50%%j/out/ranker.slurm/%j.log\n" in render(build_spec())


def test_a_job_that_must_not_requeue_has_one_attempt(run_script: Callable[..., ScriptRun]) -> None:
    run = run_script("75 0", requeue="never")
    process = run.start()
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert run.calls == ""


def test_a_requeued_script_counts_the_attempts_before(run_script: Callable[..., ScriptRun]) -> None:
    run = run_script("0")
    (run.folder / "logs" / "7.attempts").write_text("one\ntwo\nthree\n")
    process = run.start(SLURM_RESTART_COUNT="3")
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, run.calls) == (75, "")
    assert "all attempts are used: 3" in output
    assert not (run.folder / "count").exists()
    (run.folder / "logs" / "7.interruptions").write_text("1 limit\n2 preemption\n")
    process = run.start(SLURM_RESTART_COUNT="3")
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "attempt 4 on n[1-2] (failures: 1 of 3)" in output


@pytest.mark.parametrize(
    ("record", "requeues", "interruptions"),
    [
        (PREEMPTED, 1, "1 preemption\n"),
        (PREEMPTED.replace("PreemptTime=17", "PreemptTime=16"), 0, ""),
        (ENDED.replace("Restarts=0", "Restarts=1"), 0, "1 requeue\n"),
        (ENDED, 0, ""),
    ],
    ids=["preempted", "preempted before this attempt", "requeued", "cancelled"],
)
@pytest.mark.parametrize("stage", ["", "train"])
def test_a_preempted_job_requeues_itself_and_a_cancelled_one_ends(
    run_script: Callable[..., ScriptRun], record: str, requeues: int, interruptions: str, stage: str
) -> None:
    run = run_script("0", build_spec(stage=stage))
    code, calls = run.stop(record)
    assert code == 143, run.output
    assert calls.count("scontrol requeue 7") == requeues
    assert run.read_log("interruptions") == interruptions


@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING", "STOPPED", "SUSPENDED", "STAGE_OUT"])
@pytest.mark.parametrize("end", ["Unknown", str(LATER)])
def test_a_job_with_time_left_saves_and_is_requeued_in_every_state(
    run_script: Callable[..., ScriptRun], state: str, end: str
) -> None:
    record = RUNNING.replace("RUNNING", state).replace("EndTime=Unknown", f"EndTime={end}")
    run = run_script("0")
    code, calls = run.stop(record)
    assert code == 143, run.output
    assert "scancel --signal=TERM 7" in calls
    assert calls.count("scontrol requeue 7") == 1
    assert run.read_log("interruptions") == "1 limit\n"


def test_a_job_without_an_answer_of_the_controller_saves_and_is_requeued(
    run_script: Callable[..., ScriptRun],
) -> None:
    code, calls = run_script("0").stop("")
    assert code == 143
    assert calls.index("scancel --signal=TERM 7") < calls.index("scontrol requeue 7")


def test_a_preemption_in_its_grace_period_is_one_attempt(
    run_script: Callable[..., ScriptRun],
) -> None:
    """Slurm signals the steps only, and the job runs until the end of the grace period."""
    run = run_script("143 0")
    record = PREEMPTED.replace("COMPLETING", "RUNNING")
    (run.folder / "record").write_text(re.sub(r"EndTime=\d+", f"EndTime={LATER}", record))
    process = run.start()
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert (run.folder / "count").read_text() == "1\n"
    assert run.calls.count("scontrol requeue 7") == 1
    assert run.read_log("interruptions") == "1 preemption\n"


@pytest.mark.parametrize("ended", [ENDED, PREEMPTED], ids=["limit", "preemption"])
def test_a_job_that_is_cancelled_while_it_saves_ends(
    run_script: Callable[..., ScriptRun], ended: str
) -> None:
    """Also in the grace period of a preemption: it ends before its time."""
    run = run_script("0")
    record = re.sub(r"EndTime=\d+", f"EndTime={LATER}", ended.replace("COMPLETING", "RUNNING"))
    _, calls = run.stop(record, cancelled=ended)
    assert "scancel --signal=TERM 7" in calls
    assert "requeue" not in calls


def test_a_secret_that_cannot_be_read_ends_the_job(run_script: Callable[..., ScriptRun]) -> None:
    run = run_script("0", build_spec(secrets={"TOKEN": "file:/nowhere/token"}))
    process = run.start()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "the secret TOKEN cannot be read from /nowhere/token" in output


def test_the_processes_of_a_rehearsal_are_those_of_the_script() -> None:
    job = build_spec(environment={"HF_HOME": "/data/hf $cache"})
    plan = Slurm().plan(job)
    first, second = Slurm().list_node_commands(plan, LeaderAddress("127.0.0.1", 29400, "r-1"))
    assert (first.command, second.index) == (job.command, 1)
    assert first.environment["HF_HOME"] == "/data/hf $cache"
    assert first.environment["PET_RDZV_ENDPOINT"] == "127.0.0.1:29400"


PENDING = (
    "JobId=7 JobName=ranker UserId=root(0) JobState=PENDING Reason=Resources Dependency=(null) "
    "Requeue=1 Restarts=0 ExitCode=0:0 SubmitTime=2026-11-26T15:27:29 StartTime=Unknown "
    "EndTime=Unknown PreemptTime=None NodeList=(null) WorkDir=/my data/run StdOut=/my data/run/7 "
    "Comment=regauge:usd_per_hour=43.92&price_date=2026-07-20&output=out&logs=out.slurm Power="
)


def read(text: str, hosts: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the status for the text of `scontrol show job`."""
    return dataclasses.asdict(build_status(HANDLE, parse_records(text), hosts))


def test_a_pending_job_has_its_reason_and_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    status = read(PENDING)
    monkeypatch.undo()
    time.tzset()
    assert status["state"] == "pending"
    assert status["reason"].startswith("Resources: not enough nodes")
    assert (status["usd_per_hour"], status["price_date"]) == (43.92, "2026-07-20")
    assert status["output"] == "/my data/run/out"
    assert status["submitted_at"] == "2026-11-26T20:27:29Z"
    assert status["started_at"] is None
    assert status["nodes"] == ()


def test_a_shell_is_a_step_of_the_job_that_runs() -> None:
    text = PENDING.replace("PENDING", "RUNNING").replace("JobId=7", "JobId=7 NumNodes=2")
    status = build_status(HANDLE, parse_records(text), ("n1", "n2"))
    options = "--nodelist=n1 --nodes=1 --ntasks=1 --overlap --pty"
    assert status.shell_command == f"srun --jobid=7 {options} bash"
    document = describe_status(status, with_reasons=False)
    assert document["shell"] == status.shell_command
    assert all("shell_command" not in node for node in document["nodes"])
    ended = build_status(HANDLE, parse_records(text.replace("RUNNING", "COMPLETED")), ("n1", "n2"))
    assert "shell" not in describe_status(ended, with_reasons=False)


def test_a_shell_in_an_array_is_that_of_the_job_that_runs() -> None:
    array = "JobId={} ArrayJobId=7 ArrayTaskId={} JobName=ranker JobState={} NodeList=n{} Power="
    lines = [array.format(7, 0, "COMPLETED", 1), array.format(9, 1, "RUNNING", 2)]
    status = build_status(HANDLE, parse_records("\n".join(lines)), ())
    assert "--jobid=9 --nodelist=n2 " in status.shell_command


@pytest.mark.parametrize(
    ("state", "code", "expected", "exit_code", "kind"),
    [
        ("RUNNING", "0:0", "running", None, None),
        ("CONFIGURING", "0:0", "starting", None, None),
        ("COMPLETED", "0:0", "succeeded", 0, None),
        ("FAILED", "64:0", "failed", 64, "unknown"),
        ("FAILED", "0:9", "failed", 137, "unknown"),
        ("TIMEOUT", "0:15", "failed", 143, "limit"),
        ("NODE_FAIL", "0:0", "failed", 0, "node"),
        ("PREEMPTED", "0:15", "failed", 143, "preempted"),
        ("CANCELLED", "0:15", "cancelled", None, None),
        ("SUSPENDED", "0:0", "preempted", None, None),
        ("SOMETHING_NEW", "0:0", "unknown", None, None),
    ],
)
def test_states(
    state: str, code: str, expected: str, exit_code: int | None, kind: str | None
) -> None:
    text = PENDING.replace("PENDING", state).replace("ExitCode=0:0", f"ExitCode={code}")
    status = read(text, ("n1", "n2"))
    assert (status["state"], status["exit_code"]) == (expected, exit_code)
    assert (status["failure"] or {}).get("kind") == kind


def test_a_requeued_job_is_restarting() -> None:
    text = PENDING.replace("Restarts=0", "Restarts=1").replace("Resources", "BeginTime")
    assert read(text)["state"] == "restarting"


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        (
            (
                "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-29T21:14:02 "
                "DUE TO PREEMPTION ***\n2026-11-29T21:14:02Z stopped by Slurm: requeue\n"
            ),
            "preempted",
        ),
        (
            (
                "2026-11-29T22:22:39Z stopped by Slurm: preemption\nslurmstepd-n1: error: "
                "*** JOB 7 ON n1 CANCELLED AT 2026-11-29T22:22:39 DUE TO JOB REQUEUE ***\n"
            ),
            "preempted",
        ),
        (
            (
                "2026-11-29T21:46:29Z stopped by Slurm: limit\nslurmstepd-n1: error: "
                "*** JOB 7 ON n1 CANCELLED AT 2026-11-29T21:46:32 DUE TO JOB REQUEUE ***\n"
            ),
            "restarting",
        ),
    ],
    ids=["preempted and requeued by Slurm", "preempted with a grace period", "time limit"],
)
def test_a_pending_job_is_preempted_or_restarting(tmp_path: Path, lines: str, state: str) -> None:
    """The lines are those of real jobs."""
    (tmp_path / "out.slurm").mkdir()
    (tmp_path / "out.slurm" / "7.log").write_text(lines)
    text = PENDING.replace("Restarts=0", "Restarts=1").replace("/my data/run ", f"{tmp_path} ")
    assert read(text)["state"] == state


def test_the_jobs_of_an_array_have_their_states() -> None:
    texts = [
        PENDING.replace("JobId=7", f"JobId={8 + index} ArrayJobId=7 ArrayTaskId={index}").replace(
            "PENDING", state
        )
        for index, state in enumerate(("COMPLETED", "RUNNING", "FAILED"))
    ]
    status = read("\n".join(reversed(texts)))
    assert status["state"] == "running"
    states = [(node["index"], node["state"]) for node in status["nodes"]]
    assert states == [(0, "succeeded"), (1, "running"), (2, "failed")]
    assert read("\n".join([texts[0], texts[2]]))["state"] == "failed"


def test_pending_jobs_of_an_array_have_one_record() -> None:
    text = PENDING.replace("JobId=7", "JobId=7 ArrayJobId=7 ArrayTaskId=0,2-3%2")
    nodes = [(node["index"], node["state"]) for node in read(text)["nodes"]]
    assert nodes == [(0, "pending"), (2, "pending"), (3, "pending")]


def test_accounting_is_read_like_the_controller() -> None:
    line = (
        "7|ranker|CANCELLED by 0|0:15|2026-11-26T15:27:29|2026-11-26T15:28:00|2026-11-26T15:29:00|"
        "n[1-2]|None|/run|regauge:usd_per_hour=2&logs=out"
    )
    (record,) = parse_table(line)
    assert build_status(HANDLE, [record], ()).state == "cancelled"
    assert record.facts == {"usd_per_hour": "2", "logs": "out"}


def test_comments_are_one_word_and_keep_their_facts() -> None:
    facts = {"output": "/my out|put", "label.a&b": "c = d"}
    comment = build_comment(facts)
    assert not set(comment) & set(" |'\"\n")
    assert parse_comment(comment) == facts
    assert parse_comment("a comment of a person") == {}


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("Priority", "Priority: jobs with a higher priority are ahead"),
        ("QOSMaxJobsPerUserLimit", "QOSMaxJobsPerUserLimit: a limit of the QOS is reached"),
        ("AssocGrpCpuLimit", "AssocGrpCpuLimit: a limit of the account or user is reached"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "n1: requested nodes are down"),
        ("SomethingNew", "SomethingNew"),
        ("(null)", ""),
    ],
)
def test_reasons_in_plain_words(reason: str, text: str) -> None:
    assert text in describe_reason(reason)
    assert not describe_reason("(null)")


def test_the_log_names_the_node_that_failed(tmp_path: Path) -> None:
    logs = LogFolder(tmp_path, "7")
    (tmp_path / "7.attempts").write_text("one\n")
    (tmp_path / "7-1-0.log").write_text("starting\n")
    (tmp_path / "7-1-1.log").write_text("some lines of the leader\nregauge: no data; set it\n")
    (tmp_path / "70.log").write_text("")
    logs.script_log.write_text(
        "2026-11-26T15:45:38Z attempt 1 of 3 on n[1-2]\n"
        "srun: error: n2: task 1: Exited with exit code 64\n"
        "2026-11-26T15:46:03Z attempt 1 ended with code 64\n"
    )
    text = PENDING.replace("PENDING", "FAILED").replace("ExitCode=0:0", "ExitCode=64:0")
    text = text.replace("/my data/run ", f"{tmp_path} ").replace("logs=out.slurm", "logs=.")
    status = read(text, ("n1", "n2"))
    assert status["failure"]["node"] == 1
    assert status["failure"]["message"] == "no data; set it"
    assert [node["exit_code"] for node in status["nodes"]] == [None, 64]
    assert logs.find_log(1, 0, 2, is_last=True) == tmp_path / "7-1-1.log"
    assert {path.name for path in logs.list_files()} == {
        "7.attempts",
        "7.log",
        "7-1-0.log",
        "7-1-1.log",
    }


def test_the_log_of_a_rank_is_that_of_its_node_in_the_last_rendezvous(tmp_path: Path) -> None:
    """Before the nodes have met, no log is taken for the one of rank 0."""
    logs = LogFolder(tmp_path, "7")
    (tmp_path / "7-1-0.log").write_text("a warning\n" * 9)
    assert logs.find_log(1, 0, 1, is_last=False) == tmp_path / "7-1-0.log"
    assert logs.find_log(1, 0, 2, is_last=False) is None
    line = "attempt 1 on 2 nodes: n2 (4), n1 (2); this is node"
    (tmp_path / "7-1-0.log").write_text(f"{line} 1\n" + "a warning\n" * 9)
    (tmp_path / "7-1-1.log").write_text(f"{line} 0\n")
    paths = [logs.find_log(1, rank, 2, is_last=False) for rank in range(7)]
    assert paths == [tmp_path / "7-1-1.log"] * 4 + [tmp_path / "7-1-0.log"] * 2 + [None]
    with (tmp_path / "7-1-0.log").open("a") as file:
        file.write("attempt 2 on 1 nodes: n1 (2); this is node 0\n")
    assert logs.find_log(1, 0, 2, is_last=False) == tmp_path / "7-1-0.log"


def lint(job: JobSpec, **settings: Any) -> set[str]:
    """Return the names of the checks that find something."""
    return {finding.code for finding in run_lints(Slurm(**settings).plan(job))}


@pytest.mark.parametrize(
    ("code", "bad", "good"),
    [
        ("slurm-time-limit", ({}, {}), ({"hours": 1.0}, {})),
        ("slurm-time-limit", ({}, {}), ({}, {"grace_seconds": 0})),
        ("slurm-grace", ({"hours": 0.03}, {}), ({"hours": 0.04}, {})),
        ("slurm-gres", ({}, {"gres": "gpu:4"}), ({}, {"gres": "gpu:a100:8"})),
        ("slurm-gres", ({"processes": 9, "machine": P4D}, {}), ({"machine": P4D}, {})),
        ("slurm-requeue", ({}, {"requeue": "never"}), ({"max_attempts": 1}, {"requeue": "never"})),
        ("slurm-cores", ({}, {"cpus": 4}), ({}, {"cpus": 8})),
    ],
)
def test_lints(code: str, bad: tuple[Any, Any], good: tuple[Any, Any]) -> None:
    assert code in lint(build_spec(**bad[0]), **bad[1])
    assert code not in lint(build_spec(**good[0]), **good[1])


def test_lints_ignore_other_schedulers() -> None:
    codes = {finding.code for finding in run_lints(LaunchPlan(build_spec()))}
    assert not {code for code in codes if code.startswith("slurm")}


def test_without_slurm_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        PreflightError, match="'sbatch' is not installed here; install slurm-client"
    ):
        Slurm().submit(Slurm().plan(build_spec()))


@pytest.mark.parametrize(("has_run", "state"), [(True, "succeeded"), (False, "unknown")])
def test_a_forgotten_stage_has_succeeded_if_a_later_one_has_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, has_run: bool, state: str
) -> None:
    comment = "regauge:logs=logs&stage=gate&after=new:5,train:6"
    texts = {
        "5": "",
        "6": f"JobId=6 JobState=COMPLETED Comment=regauge:logs=logs WorkDir={tmp_path}",
        "7": f"JobId=7 JobState=PENDING Comment={comment} WorkDir={tmp_path}",
    }
    monkeypatch.setattr(_slurm_client, "read_config", lambda: {"ClusterName": "tiny"})
    monkeypatch.setattr(_slurm_client, "list_hosts", lambda _: [])
    monkeypatch.setattr(_slurm_client, "read_records", lambda job: parse_records(texts[job]))
    if has_run:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "6.attempts").write_text("attempt 1 of 3\n")
    stages = Slurm().find_status(HANDLE).stages
    assert [(item.name, item.state) for item in stages] == [
        ("new", state),
        ("train", "succeeded"),
        ("gate", "pending"),
    ]


def test_an_unknown_partition_names_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "config": "ClusterName             = tiny\nPreemptMode             = CANCEL\n",
        "partition": "PartitionName=low Default=YES PreemptMode=REQUEUE\nPartitionName=high X=1\n",
    }
    monkeypatch.setattr(_slurm_client, "run_program", lambda *words, **_: answers[words[-1]])
    assert _slurm_client.find_partition(None).preempt_mode == "REQUEUE"
    assert _slurm_client.find_partition("high").preempt_mode == "CANCEL"
    with pytest.raises(SettingsError, match=r"no partition 'lou'; set partition .* high, low"):
        _slurm_client.find_partition("lou")
