"""Pipelines as dependent jobs: their plans, documents, refusals and states."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.batch_schemas import find_request_problems, find_schema_problems
from launch.schemas import require_schemas
from regauge.commands import pipeline
from regauge.commands._stages import is_follower, read_node_index
from regauge.commands._stages.pipeline_file import read_pipeline_file, resolve_without_data
from regauge.commands.launch import read_request
from regauge.jobs.planning import check_lints, describe_plan, plan_job, select_launcher
from regauge.jobs.targets import Handle, JobFailure, JobState, JobStatus, LaunchPlan
from regauge.jobs.targets._aws_batch.status import find_started
from regauge.jobs.targets._kubernetes.job_status import JobObjects, describe_job_set
from regauge.jobs.targets._kubernetes.pods import CANCELLED
from regauge.jobs.targets._slurm_jobs import parse_records
from regauge.jobs.targets._slurm_script import list_submit_options
from regauge.jobs.targets._stage_jobs import join_statuses
from regauge.system.errors import SettingsError

GOLDEN = Path(__file__).parent / "golden"
RUN = """
output.folder = "/data/daily"
task.kind = "mlm"
batch.rows = 8
stop.steps = 10

[repeat]
increments = ["new"]

[registry]
path = "/data/registry"
model = "topics"

[[stage]]
verb = "prepare"
name = "new"
source = { kind = "jsonl", files = ["/data/texts/*.jsonl"] }

[[stage]]
verb = "train"
data.path = "@new"
execution = { processes = 8, nodes.count = 2 }
model = { architecture = "bert", init_from.path = "@serving" }

[[stage]]
verb = "evaluate"
data.path = "@new"
models = { new = "@train", serving = "@serving" }
execution.price.instance = "c7i.4xlarge"

[[stage]]
verb = "gate"
gate = { evaluation = "@evaluate", metrics.loss.max_loss = 0.1 }

[launch]
image = "registry/regauge:0.1.0"
hours = 2.0

[[launch.volumes]]
name = "data"
mount = "/data"
source = "fs-0123456789abcdef0"
kind = "efs"

[[launch.target]]
kind = "aws-batch"
queue = "regauge"
"""
INSTANCE = "launch.instance=p4d.24xlarge"
STACK = (
    'launch.target=[{kind="aws-batch", stack={name="regauge", subnets={subnet-1="us-east-1a"}, '
    'security_groups=["sg-1"]}}]'
)
HANDLE = Handle("aws-batch", "us-east-1", "4")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "Daily.toml"
    path.write_text(RUN)
    return path


def build_plan(run_file: Path, target: str, *overrides: str) -> LaunchPlan:
    request, settings = read_request(run_file, "pipeline", overrides)
    launcher = select_launcher(settings.launch, target)
    plan = plan_job(request, settings.launch, launcher)
    check_lints(plan)
    return plan


def test_training_has_the_nodes_and_every_other_stage_one_machine(run_file: Path) -> None:
    job = build_plan(run_file, "aws_batch", INSTANCE, "stage.train.stop.steps=5").job
    assert (job.name, job.verb, job.output, job.max_nodes) == (
        "daily",
        "pipeline",
        "/data/daily",
        2,
    )
    assert [(item.name, item.max_nodes, item.after) for item in job.stages] == [
        ("daily-new", 1, ""),
        ("daily-train", 2, "daily-new"),
        ("daily-evaluate", 1, "daily-train"),
        ("daily-gate", 1, "daily-evaluate"),
    ]
    command = ("regauge", "pipeline", "/workspace/Daily.toml", "stage.train.stop.steps=5")
    assert job.stages[1].command == (*command, "--wait", "--until", "train")
    assert {item.output for item in job.stages} == {"/data/daily"}
    assert [item.processes for item in job.stages] == [1, 8, 1, 1]


def test_a_stage_can_have_another_machine(run_file: Path) -> None:
    price = 'price.instance = "p4d.24xlarge"'
    stage = '[[stage]]\nverb = "prepare"'
    text = RUN.replace(stage, f"[execution]\n{price}\n\n{stage}")
    run_file.write_text(text)
    machines = [
        stage.machine.name if stage.machine else None
        for stage in build_plan(run_file, "aws_batch").job.stages
    ]
    assert machines == ["p4d.24xlarge", "p4d.24xlarge", "c7i.4xlarge", "p4d.24xlarge"]
    with pytest.raises(SettingsError, match=r"the stages use c7i\.4xlarge, p4d\.24xlarge"):
        build_plan(run_file, "aws_batch", STACK)


def test_the_requests_of_batch_are_golden_and_valid(run_file: Path) -> None:
    require_schemas("that the requests are valid")
    plan = build_plan(run_file, "aws_batch", INSTANCE)
    contents = {item.name: item.content for item in plan.documents}
    text = json.dumps(contents, indent=1) + "\n"
    path = GOLDEN / "aws-batch-pipeline.json"
    if "REGAUGE_WRITE_GOLDEN" in os.environ:
        path.write_text(text)
    assert text == path.read_text()
    for name, content in contents.items():
        kind = name.removeprefix(f"daily-{name.split('-')[1]}-")
        assert find_schema_problems(kind, content) == []
        assert find_request_problems(kind, content) == []
    commands = [line[-1] for line in plan.commands]
    assert commands[:2] == [
        "file://daily-new-register-job-definition.json",
        "file://daily-new-submit-job.json",
    ]
    assert len(commands) == len(contents) == 8


def test_the_stack_is_planned_once(run_file: Path) -> None:
    names = [item.name for item in build_plan(run_file, "aws_batch", INSTANCE, STACK).documents]
    assert names.count("batch-stack.json") == 1
    assert names.count("create-compute-environment.json") == 1


def test_the_options_of_slurm_order_the_stages(run_file: Path) -> None:
    run_file.write_text(RUN.partition("[launch]")[0])
    plan = build_plan(run_file, "slurm")
    assert [line[2:] for line in plan.commands if line[0] == "sbatch"] == [
        (),
        *(
            (f"--dependency=afterok:daily-{name}", "--kill-on-invalid-dep=yes")
            for name in ("new", "train", "evaluate")
        ),
    ]
    assert [item.name for item in plan.documents] == [
        f"daily-{name}.sh" for name in ("new", "train", "evaluate", "gate")
    ]
    assert "--nodes=2" in plan.documents[1].text
    document = describe_plan(plan)
    assert [item["stage"] for item in document["job"]["stages"]][-1] == "gate"


def test_the_comment_of_a_stage_names_the_jobs_before_it() -> None:
    *options, comment = list_submit_options("regauge:stage=gate", {"new": "7", "train": "9"})
    assert options == ["--dependency=afterok:9", "--kill-on-invalid-dep=yes"]
    text = f"JobId=11 JobState=PENDING Comment={comment.removeprefix('--comment=')}"
    (record,) = parse_records(text)
    assert record.earlier_stages == {"new": "7", "train": "9"}
    assert record.facts["stage"] == "gate"


@pytest.mark.parametrize(
    ("target", "override", "problem"),
    [
        ("local", INSTANCE, "target 'local' does not support jobs that wait for each other"),
        ("ray", INSTANCE, "target 'ray' does not support jobs that wait for each other"),
        ("aws_batch", "launch.jobs=2", "launch.jobs = 2 is for 'predict' alone"),
        ("aws_batch", "stage.trian.stop.steps=3", "no stage 'trian'"),
        ("aws_batch", "stage.train.stop.stps=3", "unknown key"),
        ("aws_batch", "launch.volumes=[]", "is not on a volume"),
        ("kubernetes", "launch.volumes=[]", "is not on a volume"),
        ("kubernetes", 'stage.train.execution.nodes.count="1:2"', "is not elastic"),
        ("aws_batch", f"launch.name={'n' * 60}", "is too long for a job name"),
        ("kubernetes", f"launch.name={'n' * 54}", "is too long"),
    ],
)
def test_an_impossible_pipeline_is_refused(
    run_file: Path, target: str, override: str, problem: str
) -> None:
    overrides = {INSTANCE, override}
    with pytest.raises(SettingsError, match=problem):
        build_plan(run_file, target, *sorted(overrides))


def test_two_stages_whose_jobs_have_one_name_are_refused(run_file: Path) -> None:
    run_file.write_text(
        RUN.replace('verb = "evaluate"', 'verb = "evaluate"\nname = "a.b"')
        .replace("@evaluate", "@a.b")
        .replace('verb = "gate"', 'verb = "gate"\nname = "a-b"')
    )
    with pytest.raises(SettingsError, match="two stages are named 'daily-a-b'"):
        build_plan(run_file, "aws_batch", INSTANCE)


def test_a_reference_to_no_stage_is_refused_before_the_submission(run_file: Path) -> None:
    run_file.write_text(RUN.replace("@new", "@nwe"))
    with pytest.raises(SettingsError, match="'@nwe' does not name an earlier stage"):
        build_plan(run_file, "aws_batch", INSTANCE)


def test_a_dry_run_of_a_pipeline_imports_nothing_large(run_file: Path) -> None:
    large = ("torch", "transformers", "tokenizers", "boto3")
    arguments = ["launch", str(run_file), "pipeline", INSTANCE, "--on", "aws_batch", "--dry-run"]
    code = f"""
import sys
from regauge.cli import main
assert main({[*arguments, "-o", "json"]!r}) == 0
sys.stderr.write(str([name for name in {large!r} if name in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
    assert len(json.loads(done.stdout)["documents"]) == 8


def build_status(state: JobState, **fields: Any) -> JobStatus:
    return JobStatus(HANDLE, state, **{"attempt": 1} | fields)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("succeeded", "succeeded", "succeeded"), "succeeded"),
        (("succeeded", "running", "pending"), "running"),
        (("succeeded", "pending", "pending"), "pending"),
        (("succeeded", "failed", "pending"), "pending"),
        (("succeeded", "failed", "cancelled"), "failed"),
        (("cancelled", "cancelled", "cancelled"), "cancelled"),
        (("unknown", "cancelled", "cancelled"), "unknown"),
    ],
)
def test_the_state_of_a_pipeline_is_that_of_its_current_stage(
    states: tuple[JobState, ...], expected: JobState
) -> None:
    names = ("new", "gate", "promote")
    stages = [(name, build_status(state)) for name, state in zip(names, states, strict=True)]
    status = join_statuses(HANDLE, stages)
    assert status.state == expected
    assert [(item.name, item.state) for item in status.stages] == list(
        zip(names, states, strict=True)
    )


def test_a_stage_that_never_ran_is_cancelled_and_the_failure_names_its_stage() -> None:
    failure = JobFailure("unknown", message="accuracy 0.4 < 0.5")
    failed = build_status("failed", exit_code=68, failure=failure, finished_at="2026-01-01")
    never = replace(failed, attempt=None, exit_code=None, failure=None)
    status = join_statuses(HANDLE, [("gate", failed), ("promote", never)])
    assert (status.state, status.exit_code) == ("failed", 68)
    assert status.failure is not None
    assert status.failure.message == "stage 'gate': accuracy 0.4 < 0.5"
    assert [item.state for item in status.stages] == ["failed", "cancelled"]
    assert status.finished_at == "2026-01-01"


def test_the_log_of_a_pipeline_is_that_of_the_last_stage_that_started() -> None:
    done = {"jobId": "1", "status": "SUCCEEDED"}
    failed = {"jobId": "2", "status": "FAILED", "attempts": [{}]}
    never = {"jobId": "3", "status": "FAILED", "attempts": []}
    assert find_started([done, failed, never]) is failed
    assert find_started([never]) is never


def test_a_cancelled_job_set_has_no_pending_stage() -> None:
    entries = [
        {"name": name, "template": {"metadata": {"annotations": {"regauge/stage": name}}}}
        for name in ("new", "train", "gate")
    ]
    metadata = {"name": "daily", "annotations": {CANCELLED: "true"}}
    job = {"kind": "JobSet", "metadata": metadata, "spec": {"replicatedJobs": entries}}
    complete = {"conditions": [{"type": "Complete", "status": "True"}]}
    child = {"kind": "Job", "metadata": {"name": "daily-new-0"}, "spec": {}, "status": complete}
    handle = Handle("kubernetes", "here", "default/jobset/daily")
    suspended = {"kind": "Job", "metadata": {"name": "daily-train-0"}, "spec": {"suspend": True}}
    status = describe_job_set(handle, JobObjects(job, ()), [child, suspended])
    assert status.state == "cancelled"
    assert [item.state for item in status.stages] == ["succeeded", "cancelled", "cancelled"]
    assert status.stages[1].handle == "kubernetes://here/default/job/daily-train-0"


@pytest.mark.parametrize(
    ("environment", "index"),
    [
        ({}, 0),
        ({"PET_NODE_RANK": "2", "JOB_COMPLETION_INDEX": "1"}, 2),
        ({"AWS_BATCH_JOB_NODE_INDEX": "1"}, 1),
        ({"JOB_COMPLETION_INDEX": "3"}, 3),
        ({"SLURM_NODEID": "1"}, 1),
        ({"SLURM_NODEID": "x"}, 0),
    ],
)
def test_the_number_of_a_node_comes_from_its_scheduler(
    environment: dict[str, str], index: int
) -> None:
    assert read_node_index(environment) == index


def test_only_other_nodes_of_a_training_stage_are_followers(run_file: Path) -> None:
    stages = resolve_without_data(read_pipeline_file(run_file, ()))
    second_node = {"JOB_COMPLETION_INDEX": "1"}
    assert [is_follower(stage, second_node) for stage in stages] == [False, True, False, False]
    assert not is_follower(stages[1], {"JOB_COMPLETION_INDEX": "0"})
    single = resolve_without_data(
        read_pipeline_file(run_file, ("stage.train.execution.nodes.count=1",))
    )
    assert not is_follower(single[1], second_node)


def test_a_follower_needs_the_stages_before_it(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    folder = tmp_path / "daily"
    with pytest.raises(SettingsError, match="stage 'new' is not finished, and runs on one machine"):
        pipeline.main(
            run_file,
            f"output.folder={folder}",
            f"registry.path={tmp_path / 'registry'}",
            f'stage.new.source.files=["{run_file}"]',
            until="train",
        )
    assert not folder.exists(), "a follower writes no records"
