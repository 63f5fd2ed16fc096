"""Checks of a plan: each has a case that triggers it and one that does not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from architecture.tree import ROOT
from regauge.jobs import lints
from regauge.jobs.job_spec import find_machine
from regauge.jobs.lints import Lint, run_lints
from regauge.jobs.lints_tokens import TOKENS, find_token
from regauge.jobs.targets import Document, JobSpec, LaunchPlan
from regauge.machines.catalog import load_chips
from regauge.system import choices

JOB = JobSpec("job", "train", ("regauge", "train", "run.toml"), 1, 1, 1, hours=1.0)
PAGES = [
    ROOT / "docs" / "guides" / name
    for name in (
        "launch.md",
        "aws-batch.md",
        "kubernetes.md",
        "slurm.md",
        "clusters.md",
        "images.md",
    )
]
SHARED_MEMORY = {"volumes": [{"mountPath": "/dev/shm"}]}  # noqa: S108 - text of a document
FAKE = "x7" * 20
"""Part of a secret that is none, so that scanners of repositories ignore it."""
SECRETS = {
    "an AWS access key": "AKIA" + "Q" * 16,
    "a Hugging Face token": "hf_" + FAKE,
    "a GitHub token": "ghp_" + FAKE,
    "a GitLab token": "glpat-" + FAKE,
    "an API key": "sk-" + FAKE,
    "an NVIDIA API key": "nvapi-" + FAKE,
    "a Google API key": "AIza" + "x" * 35,
    "a Slack token": "xoxb-" + "1" * 12,
    "a JSON web token": f"eyJ{FAKE}.eyJ{FAKE}.{FAKE}",
    "a private key": "-----BEGIN RSA PRIVATE KEY-----",
    "a webhook address": "https://hooks.slack.com/services/T000/B000/" + "x" * 8,
    "a password in an address": "https://user:pass@host/path",
}


def find_lints(job: JobSpec, *contents: Any) -> dict[str, Lint]:
    """Return the findings about a job and its documents by their code."""
    documents = tuple(Document(f"{n}.json", content) for n, content in enumerate(contents))
    return {lint.code: lint for lint in run_lints(LaunchPlan(job, documents))}


def build_container(image: str = "registry/name:1.0", **fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"image": image, **SHARED_MEMORY, **fields}]}}


def build_machine_job(instance: str, **fields: Any) -> JobSpec:
    return replace(JOB, machine=find_machine(instance, {}), **fields)


@pytest.mark.parametrize(
    "image", ["name", "name:latest", "host:5000/name", "host:5000/name:latest"]
)
def test_an_image_without_a_version_is_refused(image: str) -> None:
    lint = find_lints(replace(JOB, image=image))["image-tag"]
    assert image in lint.problem
    assert lint.is_error
    assert "image-tag" in find_lints(JOB, build_container(image))


@pytest.mark.parametrize("image", ["name:1.0", "host:5000/name:cuda", f"name@sha256:{'0' * 64}"])
def test_an_image_with_a_version_is_accepted(image: str) -> None:
    assert "image-tag" not in find_lints(replace(JOB, image=image), build_container(image))


def test_only_aws_batch_limits_the_attempts() -> None:
    """A job of Slurm counts preemptions as attempts, so it may need many."""
    assert find_lints(replace(JOB, max_attempts=99)) == {}


def test_a_job_with_a_price_and_no_time_limit_is_reported() -> None:
    job = build_machine_job("p4d.24xlarge", max_nodes=2)
    lint = find_lints(replace(job, hours=None))["time-limit"]
    assert not lint.is_error
    assert f"{job.usd_per_hour:.2f} USD per hour" in lint.problem
    assert "time-limit" not in find_lints(job)
    assert "time-limit" not in find_lints(replace(JOB, hours=None))


def test_containers_need_shared_memory() -> None:
    assert "shared-memory" in find_lints(JOB, {"spec": {"image": "a:1"}})
    assert "shared-memory" not in find_lints(JOB, build_container())
    batch = {"containerProperties": {"image": "a:1", "linuxParameters": {"sharedMemorySize": 9}}}
    assert "shared-memory" not in find_lints(JOB, batch)
    assert "shared-memory" not in find_lints(JOB, {"command": ["a"]})


@pytest.mark.parametrize(
    ("kind", "instance", "remedy"),
    [
        ("cuda", "trn1.32xlarge", "set accelerator to neuron"),
        ("neuron", "p4d.24xlarge", "set accelerator to cuda"),
        ("gaudi", "p5.48xlarge", "set accelerator to cuda"),
        ("cuda", "m8i.xlarge", "set accelerator to"),
    ],
)
def test_an_accelerator_needs_its_chips(kind: str, instance: str, remedy: str) -> None:
    lint = find_lints(build_machine_job(instance, accelerator=kind))["accelerator"]
    assert f"'{kind}' does not run on {instance}" in lint.problem
    assert remedy in lint.remedy
    assert lint.source


@pytest.mark.parametrize(
    ("kind", "instance"),
    [
        ("cuda", "p4d.24xlarge"),
        ("neuron", "trn1.32xlarge"),
        ("neuron-native", "trn1.32xlarge"),
        ("gaudi", "dl1.24xlarge"),
        ("cpu", "m8i.xlarge"),
        ("cpu", "p4d.24xlarge"),
        (None, "trn1.32xlarge"),
        ("my_device:Device", "trn1.32xlarge"),
    ],
)
def test_a_fitting_accelerator_is_accepted(kind: str | None, instance: str) -> None:
    assert "accelerator" not in find_lints(build_machine_job(instance, accelerator=kind))


def test_accelerators_name_vendors_of_the_catalog() -> None:
    known = {chip.vendor for chip in load_chips().values()}
    names = choices.names("accelerators")
    vendors = {name: set(choices.load("accelerators", name).chip_vendors) for name in names}
    assert set().union(*vendors.values()) <= known
    assert {name for name, value in vendors.items() if not value} == {"cpu", "generic"}


def request_efa(count: int) -> dict[str, Any]:
    limits = {"vpc.amazonaws.com/efa": count}
    return build_container(resources={"limits": limits, "requests": limits})


def mount_efa(count: int) -> dict[str, Any]:
    """Return a container of AWS Batch with device files of EFA."""
    devices = [{"hostPath": f"/dev/infiniband/uverbs{number}"} for number in range(count)]
    return build_container(linuxParameters={"devices": [{"hostPath": "/dev/neuron0"}, *devices]})


@pytest.mark.parametrize("build", [request_efa, mount_efa])
@pytest.mark.parametrize(
    ("instance", "count"),
    [
        ("p4d.24xlarge", 4),
        ("p4de.24xlarge", 4),
        ("p5.48xlarge", 32),
        ("p5en.48xlarge", 16),
        ("trn1.32xlarge", 8),
        ("trn1n.32xlarge", 16),
    ],
)
def test_the_number_of_efa_interfaces_is_that_of_the_instance(
    build: Any, instance: str, count: int
) -> None:
    job = build_machine_job(instance, max_nodes=2)
    assert not {"efa-count", "efa-request"} & find_lints(job, build(count)).keys()
    for wrong in (count - 1, count + 1):
        lint = find_lints(job, build(wrong))["efa-count"]
        assert f"{instance} has {count}" in lint.problem


def test_efa_on_an_instance_without_it_is_refused() -> None:
    lint = find_lints(build_machine_job("m8i.xlarge"), request_efa(1))["efa-count"]
    assert "m8i.xlarge has 0" in lint.problem


def test_several_nodes_with_efa_must_request_it() -> None:
    job = build_machine_job("p5.48xlarge", max_nodes=2)
    assert "request 32" in find_lints(job, build_container())["efa-request"].remedy
    assert "efa-request" not in find_lints(replace(job, max_nodes=1), build_container())
    assert "efa-request" not in find_lints(job, {"command": ["a script without containers"]})
    assert "efa-request" not in find_lints(
        build_machine_job("m8i.xlarge", max_nodes=2), build_container()
    )


@pytest.mark.parametrize("variable", [{"FI_PROVIDER": "efa"}, {"FI_EFA_USE_DEVICE_RDMA": "1"}])
def test_variables_of_efa_need_a_device(variable: dict[str, str]) -> None:
    job = build_machine_job("p4d.24xlarge", environment=variable)
    assert (
        "no document requests a device"
        in find_lints(job, build_container())["efa-variable"].problem
    )
    assert "efa-variable" not in find_lints(job, request_efa(4))
    other = build_machine_job("m8i.xlarge", environment=variable)
    assert "m8i.xlarge has none" in find_lints(other, build_container())["efa-variable"].problem
    assert "efa-variable" not in find_lints(replace(job, verb="prepare"), build_container())
    plain = replace(job, environment={"FI_PROVIDER": "tcp"})
    assert "efa-variable" not in find_lints(plain, build_container())


@pytest.mark.parametrize(("kind", "text"), SECRETS.items())
def test_a_secret_is_recognized_and_not_printed(kind: str, text: str) -> None:
    cases = (
        replace(JOB, environment={"SETTING": text}),
        replace(JOB, secrets={"SETTING": text}),
        replace(JOB, labels={"SETTING": text}),
        replace(JOB, command=(*JOB.command, f"some.key={text}")),
        replace(JOB, output=text),
    )
    for job in cases:
        lint = find_lints(job)["secret"]
        assert kind in lint.problem
        assert text not in "".join(map(str, lint))
    assert "secret" in find_lints(JOB, {"nested": [{"value": text}]})
    assert "secret" in find_lints(JOB, f"#!/bin/sh\nexport VALUE={text}\n")


def test_every_form_of_secret_is_tested() -> None:
    assert SECRETS.keys() == TOKENS.keys()
    assert all(find_token(text) == kind for kind, text in SECRETS.items())


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "aws_secret_access_key", "PASSWORD", "SMTP_PASS", "DB_PWD"],
)
def test_a_variable_with_the_name_of_a_secret_is_refused(name: str) -> None:
    lint = find_lints(replace(JOB, environment={name: "short"}))["secret"]
    assert name in lint.problem
    assert "short" not in lint.problem
    assert "secret" not in find_lints(replace(JOB, environment={name: ""}))
    assert "secret" not in find_lints(replace(JOB, secrets={name: "file:/run/secret"}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("PATH", "/usr/bin:/bin"),
        ("URL", "https://host:8080/path@2"),
        ("NAME", "task-sk-learn-of-some-length"),
        ("ARN", "arn:aws:secretsmanager:us-east-1:123456789012:secret:name-AbCdEf"),
    ],
)
def test_ordinary_variables_are_no_secrets(name: str, value: str) -> None:
    assert "secret" not in find_lints(replace(JOB, environment={name: value}))


def test_a_value_like_a_password_and_a_missing_file_are_warnings(tmp_path: Path) -> None:
    value = "x7Q!f" * 3 + "99"
    lint = find_lints(replace(JOB, environment={"SETTING": value}))["secret-value"]
    assert not lint.is_error
    assert value not in "".join(map(str, lint))
    for plain in ("Meta-Llama-3-8B-Instruct", "/Data/Run42", "0123456789abcdef0123"):
        assert "secret-value" not in find_lints(replace(JOB, environment={"SETTING": plain}))
    path = tmp_path / "secret"
    job = replace(JOB, secrets={"TOKEN": f"file:{path}"})
    assert str(path) in find_lints(job)["secret-file"].problem
    path.touch()
    assert "secret-file" not in find_lints(job)
    assert "secret-file" not in find_lints(replace(JOB, secrets={"TOKEN": "name/key"}))


def test_errors_come_first_and_every_finding_has_a_source() -> None:
    job = build_machine_job("p4d.24xlarge", hours=None, max_attempts=11, image="a")
    documents = (Document("a.json", build_container("a:latest")),)
    findings = run_lints(LaunchPlan(job, documents))
    assert [lint.is_error for lint in findings] == sorted(
        (lint.is_error for lint in findings), reverse=True
    )
    assert len(findings) >= 3
    assert all(lint.source and lint.remedy for lint in findings)


def test_every_check_is_used_and_in_the_table_of_a_page() -> None:
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
    table = "".join(line for line in lines if line.startswith("| `"))
    code = "".join(path.read_text() for path in Path(lints.__file__).parent.rglob("*lints*.py"))
    rules = lints.load_rules()
    assert not [name for name in rules if f"`{name}`" not in table]
    assert set(re.findall(r'build_lint\(\s*"([-a-z0-9]+)"', code)) == set(rules)
    for rule in rules.values():
        assert rule["problem"]
        assert rule["remedy"]
        assert rule["source"].startswith(("https://", "{source}"))
