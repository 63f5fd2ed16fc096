"""The verbs `launch` and `job`: plans, formats, errors with their exit codes, Python functions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

import regauge
from regauge import cli
from regauge.commands import job, launch
from regauge.jobs import launched_jobs
from regauge.jobs.job_spec import LaunchRequest, build_command, build_job
from regauge.jobs.settings import Launch
from regauge.jobs.targets import (
    Handle,
    JobEvent,
    JobSpec,
    JobState,
    JobStatus,
    Launcher,
    LaunchPlan,
    Leftover,
    LogRequest,
    NodeStatus,
)
from regauge.system.errors import ChildError, SettingsError, TransientError

RUN = """
data.path = "data"
task.kind = "mlm"
model.architecture = "bert"
batch.rows = 8
stop.steps = 10
output.folder = "out/run"
"""
HANDLE = "local://here/1/2"
LARGE = ("torch", "transformers", "pyarrow", "huggingface_hub", "boto3", "ray", "yaml")
VARIABLE = "launch.environment={ HF_TOKEN = 'abcdef' }"
MODELS = "models={ trained = 'out/run' }"


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run file in the working folder; jobs would be written to it, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "My_run 1.toml"
    path.write_text(RUN)
    return path


@dataclass
class Printed:
    """The end of a command in this process."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.out)
        return document


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    def run(*arguments: str) -> Printed:
        code = cli.main(arguments)
        printed = capsys.readouterr()
        return Printed(code, printed.out, " ".join(printed.err.split()))

    return run


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    run: Callable[..., Printed], run_file: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    arguments = ("launch", str(run_file), "train", "execution.nodes.count=2", "stop.steps=20")
    answers = [
        run(*arguments, "launch.instance=p4d.24xlarge", "launch.hours=2", "--dry-run", *form)
        for form in ((), ("-o", "json"), ("--json",), ("--output", "json"), ("--output=json",))
    ]
    assert [answer.code for answer in answers] == [0] * 5
    assert len({answer.out for answer in answers[1:]}) == 1, "all forms print the same JSON"
    document = answers[1].document
    assert document["job"]["name"] == "my-run-1"
    command = [sys.executable, "-m", "regauge", "train", str(run_file)]
    assert document["job"]["command"] == [*command, "execution.nodes.count=2", "stop.steps=20"]
    assert document["price"].endswith("(2 x p4d.24xlarge, on-demand in us-east-1, 2026-07-20)")
    assert "handle" not in document
    text = answers[0].out
    assert text.startswith("# job.json\n{")
    for part in ("_local_scheduler", "restart policy: The other nodes wait", document["price"]):
        assert part in text
    assert sorted(tmp_path.rglob("*")) == before


def test_export_compiles_the_model_of_the_run_file_by_default(
    run: Callable[..., Printed], run_file: Path
) -> None:
    assert run("launch", str(run_file), "export", "--dry-run").code == 0
    run_file.write_text(RUN.replace("output.folder", "data.name"))
    refused = run("launch", str(run_file), "export", "--dry-run")
    assert refused.code == 2
    assert "no model to export" in refused.err


def test_a_dry_run_imports_nothing_large(run_file: Path) -> None:
    code = f"""
import json, sys
from regauge.cli import main
assert main(["launch", {str(run_file)!r}, "train", "--dry-run", "-o", "json"]) == 0
sys.stderr.write(json.dumps([name for name in {LARGE!r} if name in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stderr) == []
    assert json.loads(done.stdout)["job"]["verb"] == "train"


@pytest.mark.parametrize(
    ("arguments", "problem", "remedy"),
    [
        (("trian",), "'trian' cannot be launched", "did you mean 'train'?"),
        (("train", "--on", "slrm"), "no target named 'slrm'", ""),
        (("train", "launch.nmae=x"), "unknown key 'launch.nmae'", "did you mean 'name'?"),
        (("train", "launch.name=Bad_Name"), "is not an RFC 1035 label", "letters"),
        (("train", "launch.instance=p4d.24xlrge"), "is not in the catalog", "p4d.24xlarge"),
        (("train", "launch.jobs=2"), "launch.jobs = 2 is for 'predict'", "execution.nodes.count"),
        (("train", "execution.nodes.endpoint=a:1"), "execution.nodes.endpoint", "remove it"),
        (("train", "execution.nodes.count=x"), "is not a number of nodes", ""),
        (("train", VARIABLE), "(secret: https://", "launch.secrets"),
        (
            ("train", "launch.environment={ A = '1' }", "launch.secrets={ A = 'x' }"),
            "remove one",
            "",
        ),
        (("train", "launch.environment={ 1A = '1' }"), "is not the name of an environment", ""),
        (("train", "stop.stps=1"), "unknown key 'stop.stps'", "did you mean 'steps'?"),
        (("train", "--dry-run", "--rehearse"), "--dry-run runs nothing", "use one of them"),
        (("evaluate", MODELS, "--rehearse"), "'evaluate' cannot be rehearsed", "rehearse 'train'"),
    ],
)
def test_an_invalid_launch_is_one_line_with_code_2(
    run: Callable[..., Printed],
    run_file: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    problem: str,
    remedy: str,
) -> None:
    answer = run("launch", str(run_file), *arguments)
    assert answer.code == 2
    assert answer.err.startswith("regauge: ")
    assert problem in answer.err
    assert remedy in answer.err.rpartition("; ")[2]
    assert "abcdef" not in answer.err
    assert not (tmp_path / "state").exists(), "nothing is half-created"


def test_an_error_is_a_document_with_every_form_of_json(
    run: Callable[..., Printed], run_file: Path
) -> None:
    for form in (("-o", "json"), ("--json",), ("--output=json",)):
        answer = run("launch", str(run_file), "trian", *form)
        assert answer.document["code"] == 2
    assert run("launch", str(run_file), "trian", "-o", "text").out == ""


def test_other_verbs_have_one_node(run: Callable[..., Printed], run_file: Path) -> None:
    arguments = ("evaluate", MODELS, "execution.nodes.count=4", "--dry-run", "-o", "json")
    document = run("launch", str(run_file), *arguments).document
    assert document["job"]["max_nodes"] == 1


def test_a_setting_without_effect_is_a_note(
    run: Callable[..., Printed], run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = FakeScheduler()
    monkeypatch.setattr(launch, "select_launcher", lambda *_: scheduler)
    settings = {
        "launch.image": "launch.image=a:1",
        "launch.environment": "launch.environment={ A = '1' }",
        "launch.instance": "launch.instance=p4d.24xlarge",
        "launch.spot": "launch.spot=true",
        "launch.hours": "launch.hours=1",
        "launch.max_attempts": "launch.max_attempts=4",
    }
    for key, override in settings.items():
        answer = run("launch", str(run_file), "train", override, "--dry-run", "-o", "json")
        assert answer.document["notes"] == [f"{key} has no effect on this target."]
    others = run("launch", str(run_file), "train", "execution.processes=3", "-o", "json")
    assert others.document["notes"] == []


def test_one_launch_file_is_for_several_targets(
    run: Callable[..., Printed], run_file: Path
) -> None:
    """Each target with containers may have its own image and volumes."""
    run_file = run_file.rename(run_file.with_name("job.toml"))
    volume = "{ name = 'data', mount = '/data', source = 'claim' }"
    shared = ("launch.image=a:1", "launch.spot=true", f"launch.volumes=[{volume}]")
    table = (
        f"{{ kind = 'kubernetes', image = 'b:2', volumes = [{volume.replace('claim', 'own')}] }}"
    )
    arguments = (*shared, f"launch.target=[{table}]", "--dry-run", "-o", "json")
    notes = {}
    for target in ("local", "slurm", "ray", "kubernetes"):
        document = run("launch", str(run_file), "train", "--on", target, *arguments).document
        notes[target] = [note for note in document["notes"] if "this target" in note]
        is_own = target == "kubernetes"
        assert document["job"]["image"] == ("b:2" if is_own else "a:1")
        assert document["job"]["volumes"][0]["source"] == ("own" if is_own else "claim")
    expected = ["spot", "image", "volumes"]
    for target in ("local", "slurm", "ray"):
        assert notes[target] == [
            f"launch.{name} has no effect on this target." for name in expected
        ]
    assert notes["kubernetes"] == []


UNREACHABLE = "unreachable"
"""Reason of a status that the fake scheduler does not report, because it does not answer."""


class FakeScheduler(Launcher):
    """A scheduler in memory, with the states that a test lists."""

    kind: ClassVar[str] = "local"
    _states: list[JobStatus] = []
    _calls: list[str] = []

    def model_post_init(self, _: Any) -> None:
        self._states, self._calls = [], []

    def plan(self, job: JobSpec) -> LaunchPlan:
        return LaunchPlan(job)

    def submit(self, plan: LaunchPlan) -> Handle:
        self._calls.append(plan.job.name)
        return Handle.parse(HANDLE)

    def find_status(self, handle: Handle) -> JobStatus:
        assert str(handle) == HANDLE
        status = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        if status.reason == UNREACHABLE:
            raise TransientError("the scheduler does not answer", "try again")
        return status

    def list_events(self, handle: Handle) -> list[JobEvent]:
        return [JobEvent("2026-01-01T00:00:00+00:00", "job", f"began {handle.job_id}")]

    def read_log(self, handle: Handle, request: LogRequest) -> Iterator[str]:
        yield from (f"[bold]{handle.job_id}", str(request))

    def cancel(self, handle: Handle) -> None:
        self._calls.append(f"cancel {handle.job_id}")

    def clean_up(self, handle: Handle) -> list[Leftover]:
        return [Leftover(handle.job_id, "volume", "rm")]


def build_status(state: JobState, **fields: Any) -> JobStatus:
    return JobStatus(Handle.parse(HANDLE), state, **fields)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    scheduler = FakeScheduler()
    monkeypatch.setattr(job, "select_launcher", lambda *_: scheduler)
    monkeypatch.setattr(job, "STATUS_SECONDS", 0.001)
    return scheduler


def test_the_status_has_reasons_on_request(
    scheduler: FakeScheduler, run: Callable[..., Printed]
) -> None:
    node = NodeStatus(0, "running", host="a")
    scheduler._states = [build_status("running", reason="why", attempt=1, nodes=(node,))]
    plain = run("job", "status", HANDLE, "-o", "json").document
    assert plain == {
        "handle": HANDLE,
        "state": "running",
        "attempt": 1,
        "nodes": [{"index": 0, "state": "running", "host": "a"}],
    }
    assert run("job", "status", HANDLE, "--why", "--json").document["reason"] == "why"
    scheduler._states = [build_status("pending", reason="Resources")]
    assert "reason: Resources" in run("job", "status", HANDLE).out


def test_the_list_has_the_states_of_the_launched_jobs(
    scheduler: FakeScheduler,
    run: Callable[..., Printed],
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run("job", "list", "-o", "json").document == {"jobs": []}
    monkeypatch.setattr(launch, "select_launcher", lambda *_: scheduler)
    monkeypatch.setattr(launched_jobs, "select_launcher", lambda *_: scheduler)
    assert run("launch", str(run_file), "train").code == 0
    scheduler._states = [build_status("running", attempt=2)]
    (row,) = run("job", "list", "-o", "json").document["jobs"]
    row.pop("submitted_at")
    assert row == {"handle": HANDLE, "verb": "train", "state": "running", "attempt": 2}
    scheduler._states = [build_status("unknown", reason=UNREACHABLE)]
    (row,) = run("job", "list", "-o", "json").document["jobs"]
    assert row["reason"] == "the scheduler does not answer"


def test_wait_polls_and_returns_the_exit_code(
    scheduler: FakeScheduler, run: Callable[..., Printed]
) -> None:
    states: tuple[JobState, ...] = ("pending", "running", "succeeded")
    scheduler._states = [build_status(state) for state in states]
    answer = run("job", "wait", HANDLE, "-o", "json")
    assert (answer.code, answer.document["state"]) == (0, "succeeded")
    assert len(scheduler._states) == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (build_status("failed", exit_code=64), 64),
        (build_status("failed", exit_code=143), 143),
        (build_status("failed"), 1),
        (build_status("cancelled"), 130),
        (build_status("cancelled", exit_code=143), 143),
    ],
)
def test_wait_fails_as_the_job_failed(
    scheduler: FakeScheduler, run: Callable[..., Printed], status: JobStatus, code: int
) -> None:
    scheduler._states = [status]
    answer = run("job", "wait", HANDLE, "-o", "json")
    assert answer.code == code
    assert answer.document["state"] == status.state
    assert f"{HANDLE} {status.state}" in answer.err
    assert f"read it with: regauge job logs {HANDLE}" in answer.err


def test_wait_ends_after_its_timeout_and_for_an_unknown_state(
    scheduler: FakeScheduler, run: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler._states = [build_status("running")]
    answer = run("job", "wait", HANDLE, "--timeout", "0.01")
    assert answer.code == 75
    assert answer.err == f"regauge: {HANDLE} is running after 0.01 s; wait again"
    monkeypatch.setattr(job, "UNKNOWN_SECONDS", 0.01)
    scheduler._states = [build_status("unknown", reason="no answer")]
    answer = run("job", "wait", HANDLE)
    assert answer.code == 75
    assert f"the state of {HANDLE} is unknown: no answer; wait again, or remove it" in answer.err


def test_wait_continues_after_the_scheduler_did_not_answer(
    scheduler: FakeScheduler, run: Callable[..., Printed]
) -> None:
    unreachable = build_status("unknown", reason=UNREACHABLE)
    scheduler._states = [build_status("running"), unreachable, build_status("succeeded")]
    assert run("job", "wait", HANDLE).code == 0


def test_events_logs_cancel_and_cleanup(
    scheduler: FakeScheduler, run: Callable[..., Printed]
) -> None:
    scheduler._states = [build_status("cancelled")]
    (event,) = run("job", "events", HANDLE, "-o", "json").document["events"]
    assert event["message"] == "began 1/2"
    lines = run("job", "logs", HANDLE, "--rank", "3", "--attempt", "2", "--follow").out.splitlines()
    assert lines == ["[bold]1/2", str(LogRequest(3, 2, follow=True))]
    assert run("job", "logs", HANDLE, "-o", "json").document["lines"][0] == "[bold]1/2"
    assert run("job", "cancel", HANDLE, "-o", "json").document["state"] == "cancelled"
    assert scheduler._calls == ["cancel 1/2"]
    assert run("job", "cleanup", HANDLE, "-o", "json").document["leftovers"][0]["remedy"] == "rm"


@pytest.mark.parametrize(
    ("handle", "problem"),
    [
        ("nonsense", "'nonsense' is not a job handle"),
        ("local://host", "is not a job handle"),
        ("slrm://host/1", "no target named 'slrm'"),
        ("local://elsewhere/tmp/job", "runs on host 'elsewhere'"),
    ],
)
@pytest.mark.parametrize("action", ["status", "events", "logs", "cancel", "wait", "cleanup"])
def test_an_unusable_handle_is_one_line_with_code_2(
    run: Callable[..., Printed], action: str, handle: str, problem: str
) -> None:
    answer = run("job", action, handle)
    assert answer.code == 2
    assert problem in answer.err


def test_an_unknown_action_lists_the_known_ones(run: Callable[..., Printed]) -> None:
    answer = run("job", "stop", HANDLE)
    assert answer.code == 2
    assert "cancel" in answer.err


def test_the_functions_return_what_the_commands_print(
    scheduler: FakeScheduler, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = regauge.launch(str(run_file), "train", dry_run=True, launch__name="other")
    assert plan["job"]["name"] == "other"
    with pytest.raises(SettingsError, match="write the settings to a run file"):
        regauge.launch({"data": {"path": "data"}}, "train", dry_run=True)
    monkeypatch.setattr(launch, "select_launcher", lambda *_: scheduler)
    assert regauge.launch(run_file, "train")["handle"] == HANDLE
    assert scheduler._calls == ["my-run-1"]
    scheduler._states = [build_status("failed", exit_code=66)]
    assert regauge.job("status", HANDLE)["state"] == "failed"
    assert regauge.job("logs", HANDLE)["lines"][0] == "[bold]1/2"
    with pytest.raises(ChildError) as caught:
        regauge.job("wait", HANDLE)
    assert caught.value.exit_code == 66
    scheduler._states = [build_status("running")]
    with pytest.raises(TransientError):
        regauge.job("wait", HANDLE, timeout=0.01)


def test_the_cost_of_an_own_price_has_its_date(run: Callable[..., Printed], run_file: Path) -> None:
    price = '{ instance = "p4d.24xlarge", usd_per_hour = 10.0, as_of = 2026-01-31 }'
    run_file.write_text(f"{RUN}execution.price = {price}")
    answer = run("launch", str(run_file), "train", "launch.jobs=1", "--dry-run", "-o", "json")
    assert answer.document["price"] == "10.00 USD per hour (1 x p4d.24xlarge, run file, 2026-01-31)"
    run_file.write_text(f"{RUN}execution.price = {{ usd_per_hour = 10.0, as_of = 2026-01-31 }}")
    answer = run("launch", str(run_file), "train", "--dry-run", "-o", "json")
    assert answer.document["price"] == "10.00 USD per hour (1 x node, run file, 2026-01-31)"
    assert "its machines cost 10.00 USD per hour" in answer.document["warnings"][0]


def test_metrics_in_a_container_are_served_to_other_machines(run_file: Path) -> None:
    tables = {"monitoring": {"port": 9400}}
    request = LaunchRequest(run_file, "train", (), tables)
    command = build_command(request, 1, is_container=True)
    assert command[3:] == ("monitoring.host=0.0.0.0",)
    assert "monitoring.host=0.0.0.0" not in build_command(request, 1, is_container=False)
    tables["monitoring"]["host"] = "10.0.0.1"
    assert build_command(request, 1, is_container=True)[3:] == ()


def test_the_settings_of_training_are_no_part_of_a_preparation(run_file: Path) -> None:
    tables = {"execution": {"processes": 8}, "accelerator": "cuda"}
    jobs = [
        build_job(LaunchRequest(run_file, verb, (), tables), Launch(), FakeScheduler())
        for verb in ("train", "prepare")
    ]
    assert [(job.processes, job.accelerator) for job in jobs] == [(8, "cuda"), (1, None)]
