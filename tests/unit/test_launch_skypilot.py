"""SkyPilot task files: their content, their run script in bash, and SkyPilot's own parser.

The parser is another environment's: REGAUGE_TEST_SKYPILOT names its Python.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from regauge.cli import main
from regauge.jobs.targets import Handle, JobSpec, LogRequest, Machine
from regauge.jobs.targets.skypilot import SkyPilot
from regauge.system.errors import SettingsError

GOLDEN = Path(__file__).parent / "golden" / "skypilot-train.yaml"
PYTHON = os.environ.get("REGAUGE_TEST_SKYPILOT")
MACHINE = Machine("p5.48xlarge", "H100", "NVIDIA", 8, 32, 192, 2048, 55.04, "2026-07-20")
PARSE = """
import sys, sky, yaml
from sky.utils import common_utils, schemas
for path in sys.argv[1:]:
    config = yaml.safe_load(open(path))
    common_utils.validate_schema(config, schemas.get_task_schema())
    common_utils.validate_schema(config["resources"], schemas.get_resources_schema())
    if "instance_type" not in config["resources"]:  # it would download a catalog
        print(repr(sky.Task.from_yaml(path)))
"""


def build_job(folder: Path, **changes: Any) -> JobSpec:
    command = ("/usr/bin/python3", "-m", "regauge", "train", str(folder / "runs" / "llama.toml"))
    job = JobSpec(
        name="llama",
        verb="train",
        command=(*command, "stop.steps=$HOME 5"),
        min_nodes=2,
        max_nodes=2,
        processes="auto",
        machine=MACHINE,
        spot=True,
        environment={"NCCL_DEBUG": "WARN"},
        secrets={"HF_TOKEN": "env:HF_TOKEN"},
        hours=1.5,
        output="/runs/llama",
        labels={"team": "search"},
    )
    return replace(job, **changes)


def build_launcher(folder: Path, **changes: Any) -> SkyPilot:
    settings: dict[str, Any] = {"working_dir": str(folder), "storage": {"/runs": "team-volume"}}
    return SkyPilot.model_validate(settings | {"folder": str(folder / "out")} | changes)


def plan_task(folder: Path, job: JobSpec | None = None, **changes: Any) -> dict[str, Any]:
    plan = build_launcher(folder, **changes).plan(job or build_job(folder))
    task: dict[str, Any] = yaml.safe_load(plan.documents[0].text)
    return task


def test_a_task_file_equals_the_golden_file(tmp_path: Path) -> None:
    (document,) = build_launcher(tmp_path).plan(build_job(tmp_path)).documents
    assert document.name == "llama.yaml"
    assert document.text.replace(str(tmp_path), "/work") == GOLDEN.read_text(encoding="utf-8")


def test_the_secret_is_named_and_never_read(tmp_path: Path) -> None:
    plan = build_launcher(tmp_path).plan(build_job(tmp_path))
    path = str(tmp_path / "out" / "llama.yaml")
    options = ("--yes", "--detach-run", "--secret", "HF_TOKEN", path)
    assert plan.commands == (("sky", "jobs", "launch", *options),)
    assert yaml.safe_load(plan.documents[0].text)["secrets"] == {"HF_TOKEN": None}


def test_accelerators_replace_the_machine_type(tmp_path: Path) -> None:
    assert plan_task(tmp_path)["resources"]["instance_type"] == "p5.48xlarge"
    launcher = build_launcher(tmp_path, accelerators="H100:8", infra="gcp", disk_gib=500)
    plan = launcher.plan(build_job(tmp_path))
    resources = yaml.safe_load(plan.documents[0].text)["resources"]
    assert (resources["accelerators"], resources["infra"]) == ("H100:8", "gcp")
    assert resources["disk_size"] == 500
    assert "instance_type" not in resources
    assert "machine" not in plan.used
    assert {"min_nodes", "max_nodes", "spot"} <= plan.used


@pytest.mark.parametrize(
    ("job", "target", "problem"),
    [
        ({"output": "out/llama"}, {}, "is lost with its node"),
        ({"output": "/other/llama"}, {}, "is lost with its node"),
        ({}, {"storage": {"/runs": "s3://team/runs"}}, "a bucket is not shared"),
        ({"secrets": {"HF_TOKEN": "file:/token"}}, {}, "HF_TOKEN is not a reference"),
        ({}, {"working_dir": "/usr"}, "the run file is not in working_dir"),
    ],
)
def test_what_would_be_lost_is_refused(
    job: dict[str, Any], target: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=problem):
        plan_task(tmp_path, build_job(tmp_path, **job), **target)


def test_one_node_may_write_to_a_bucket(tmp_path: Path) -> None:
    job = build_job(tmp_path, min_nodes=1, max_nodes=1)
    task = plan_task(tmp_path, job, storage={"/runs": "s3://team/runs", "/data": "data-volume"})
    assert task["file_mounts"] == {"/runs": {"source": "s3://team/runs", "mode": "MOUNT_CACHED"}}
    assert task["volumes"] == {"/data": "data-volume"}
    assert "PET_" not in task["run"]


def test_bash_runs_the_command_with_the_variables_of_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "regauge" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nenv | grep ^PET_ | sort\nexit 75\n')
    program.chmod(0o755)
    sky = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.9",
        "SKYPILOT_TASK_ID": "sky-managed-1",
    }
    process = subprocess.run(
        ["/bin/bash", "-c", plan_task(tmp_path)["run"]],
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"], **sky},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stdout.splitlines() == [
        *("-m", "regauge", "train", "runs/llama.toml", "stop.steps=$HOME 5"),
        "PET_NNODES=2",
        "PET_RDZV_BACKEND=c10d",
        "PET_RDZV_ENDPOINT=10.0.0.4:29400",
        "PET_RDZV_ID=sky-managed-1",
    ]
    assert process.returncode == 75


def test_the_time_limit_ends_the_command(tmp_path: Path) -> None:
    program = tmp_path / "regauge" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nsleep 60\n")
    program.chmod(0o755)
    job = build_job(tmp_path, min_nodes=1, max_nodes=1, hours=1 / 3600)
    command = ["/bin/bash", "-c", plan_task(tmp_path, job)["run"]]
    process = subprocess.run(command, env={**os.environ, "HOME": str(tmp_path)}, check=False)
    assert process.returncode == 124  # no code that starts it again


def test_launch_writes_the_file_and_job_names_the_command_of_skypilot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run_file = tmp_path / "llama.toml"
    run_file.write_text(
        'data.path = "/data"\ntask.kind = "mlm"\nmodel.path = "bert"\nstop.steps = 5\n'
        "batch = { rows = 8, microbatch_rows = 8 }\n"
        'output.folder = "/runs/llama"\nlaunch.target = [\n'
        '{ kind = "skypilot", accelerators = "L4:1", storage = { "/runs" = "s3://team/runs" } }]\n'
    )
    assert main(["launch", str(run_file), "train", "--on", "skypilot"]) == 0
    path = tmp_path / "out" / "skypilot" / "llama.yaml"
    assert yaml.safe_load(path.read_text())["resources"]["accelerators"] == "L4:1"
    handle = f"skypilot://task/{path}"
    assert handle in capsys.readouterr().out.replace("\n", "")
    assert main(["job", "cancel", handle]) == 2
    assert "run: sky jobs cancel --name llama" in " ".join(capsys.readouterr().err.split())
    assert main(["job", "list"]) == 0
    assert main(["job", "cleanup", handle]) == 0
    assert not path.exists()


def test_every_question_names_a_command(tmp_path: Path) -> None:
    launcher, handle = build_launcher(tmp_path), Handle("skypilot", "task", "/x/llama.yaml")
    for ask, command in (
        (launcher.find_status, "sky jobs queue"),
        (launcher.list_events, "sky jobs queue"),
        (lambda job: launcher.read_log(job, LogRequest()), "sky jobs logs --name llama"),
    ):
        with pytest.raises(SettingsError) as error:
            ask(handle)
        assert error.value.remedy == f"run: {command}"


@pytest.mark.skipif(PYTHON is None, reason="no REGAUGE_TEST_SKYPILOT: SkyPilot's parser not asked")
def test_skypilot_parses_the_task_files(tmp_path: Path) -> None:
    one = build_job(tmp_path, min_nodes=1, max_nodes=1, machine=None)
    bucket = {"storage": {"/runs": "s3://team/runs"}, "accelerators": "H100:8"}
    plans = [
        build_launcher(tmp_path).plan(build_job(tmp_path)),
        build_launcher(tmp_path, **bucket, infra="aws/us-east-1").plan(one),
    ]
    paths = [tmp_path / f"{index}.yaml" for index in range(len(plans))]
    for path, plan in zip(paths, plans, strict=True):
        path.write_text(plan.documents[0].text)
    command = [str(PYTHON), "-c", PARSE, *map(str, paths)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "'H100': 8" in process.stdout
