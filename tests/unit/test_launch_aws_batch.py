"""Requests to AWS Batch: their content, their schemas, their checks, and the states of jobs."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from architecture.tree import ROOT
from launch.batch_schemas import (
    BATCH_SCHEMAS,
    OPERATIONS,
    find_request_problems,
    find_schema_problems,
)
from launch.batch_simulator import decide
from regauge import config
from regauge.commands.launch import read_request
from regauge.jobs import lints_aws_batch
from regauge.jobs.job_spec import find_machine
from regauge.jobs.lints import run_lints
from regauge.jobs.planning import check_lints, describe_plan, plan_job, select_launcher
from regauge.jobs.targets import Document, Handle, JobSpec, LaunchPlan, LeaderAddress
from regauge.jobs.targets._aws_batch import jobs
from regauge.jobs.targets._aws_batch.jobs import find_log_stream, read_stream, select_child
from regauge.jobs.targets._aws_batch.status import build_status, find_state, list_job_events
from regauge.jobs.targets.aws_batch import AwsBatch
from regauge.machines import aws_client
from regauge.machines.aws_client import AwsClient
from regauge.system.errors import RESTART_CODES, PreflightError, SettingsError, TransientError
from unit.test_launch_kubernetes import build_volume

Contents = dict[str, Any]
EXAMPLES = ("ranker", "bert-1.5b")
ROLE = "arn:aws:iam::123456789012:role/regauge"
REFERENCE = "arn:aws:secretsmanager:us-east-1:123456789012:secret:token-AbCdEf"
VOLUME = build_volume("data", "/data", "fs-0123456789abcdef0", "efs")
CLAIM = build_volume("v", "/v", "claim-1", "claim")
LUSTRE = build_volume("v", "/v", "fs-1", "fsx")
STACK: dict[str, Any] = {
    "name": "regauge",
    "subnets": {"subnet-1": "us-east-1a"},
    "security_groups": ("sg-1",),
}


def build_spec(**changes: Any) -> JobSpec:
    """Return a job on one machine with eight GPUs."""
    instance = changes.pop("instance", "p4d.24xlarge")
    values: dict[str, Any] = {
        "name": "run",
        "verb": "train",
        "command": ("regauge", "train", "/workspace/run.toml"),
        "min_nodes": changes.get("max_nodes", 1),
        "max_nodes": 1,
        "processes": "auto",
        "machine": find_machine(instance, {}),
        "image": "registry/regauge:0.1.0",
        "output": "/data/out",
        "volumes": (VOLUME,),
    }
    return JobSpec(**values | changes)


def build_target(**settings: Any) -> AwsBatch:
    """Return the settings of the target, with a queue."""
    tables = {"kind": "aws-batch", "queue": "regauge", **settings}
    target: AwsBatch = config.parse_choice("launchers", tables)
    return target


def build_plan(settings: dict[str, Any] | None = None, **changes: Any) -> LaunchPlan:
    return build_target(**(settings or {})).plan(build_spec(**changes))


def plan_stack(stack: dict[str, Any], **changes: Any) -> LaunchPlan:
    """Return the plan of a job with changed settings of its stack."""
    return build_plan({"stack": STACK | stack}, **changes)


def read_contents(plan: LaunchPlan) -> Contents:
    return {document.name: deepcopy(document.content) for document in plan.documents}


def read_container(plan: LaunchPlan) -> Contents:
    definition = read_contents(plan)["register-job-definition.json"]
    if "containerProperties" in definition:
        return dict(definition["containerProperties"])
    return dict(definition["nodeProperties"]["nodeRangeProperties"][0]["container"])


def plan_example(name: str) -> LaunchPlan:
    request, settings = read_request(ROOT / "runs" / f"batch-{name}.toml", "train", ())
    launcher = select_launcher(settings.launch, "aws_batch")
    return plan_job(request, settings.launch, launcher)


SPECS: dict[str, Callable[[], LaunchPlan]] = {
    "container": build_plan,
    "array": lambda: build_plan(verb="predict", jobs=4, instance="c7i.4xlarge"),
    "multi-node": lambda: build_plan({"job_role": ROLE}, max_nodes=4),
    "secrets": lambda: build_plan({"execution_role": ROLE}, secrets={"TOKEN": REFERENCE}),
    "spot": lambda: plan_stack({}, spot=True, hours=2.5, labels={"team": "a"}),
    "stack": lambda: plan_stack({}, max_nodes=2),
    "fair share": lambda: build_plan(
        {"stack": STACK | {"fair_share": {"weights": {"a": 1}}}, "share_identifier": "a"}
    ),
    "reservation": lambda: plan_stack(
        {"capacity_reservation": {"id": "cr-1", "zone": "us-east-1a"}}, max_nodes=2
    ),
    "chips": lambda: plan_stack({}, instance="trn1.32xlarge", max_nodes=2),
    "volumes": lambda: build_plan(
        volumes=(VOLUME, build_volume("b", "/b", "/mnt/b", "host", read_only=True)),
        environment={"A": "1"},
        shared_memory_gib=8,
    ),
} | {name: (lambda name=name: plan_example(name)) for name in EXAMPLES}


# Documents


@pytest.mark.parametrize("name", SPECS)
def test_every_request_is_valid_for_the_service_and_its_strict_schema(name: str) -> None:
    requests = [item for item in SPECS[name]().documents if item.name in OPERATIONS]
    for request in requests:
        assert find_request_problems(request.name, request.content) == [], request.name
    if not BATCH_SCHEMAS.is_dir():
        pytest.skip(f"no schemas in {BATCH_SCHEMAS}: the requests of {name} are not proved")
    for request in requests:
        if OPERATIONS[request.name][0] == "batch":
            assert find_schema_problems(request.name, request.content) == [], request.name


def test_a_request_with_an_unknown_key_is_detected() -> None:
    if not BATCH_SCHEMAS.is_dir():
        pytest.skip("no schemas here: unknown keys are not proved")
    content = read_contents(build_plan())["register-job-definition.json"]
    content["containerProperties"]["gpus"] = 8
    assert find_schema_problems("register-job-definition.json", content)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_dry_run_of_an_example_is_the_golden_file(name: str) -> None:
    file = ROOT / "tests" / "unit" / "golden" / f"aws-batch-{name}.json"
    plan = plan_example(name)
    answer = describe_plan(plan) | {"warnings": [lint.problem for lint in check_lints(plan)]}
    command = f"regauge launch runs/batch-{name}.toml train --on aws_batch --dry-run -o json"
    assert json.loads(json.dumps(answer)) == json.loads(file.read_text()), f"{command} > {file}"


@pytest.mark.parametrize("name", SPECS)
def test_a_plan_is_deterministic_and_passes_its_checks(name: str) -> None:
    first, second = SPECS[name](), SPECS[name]()
    assert [item.text for item in first.documents] == [item.text for item in second.documents]
    assert not [lint for lint in check_lints(first) if lint.is_error]


def test_a_single_job_takes_the_whole_machine() -> None:
    plan = build_plan()
    definition = read_contents(plan)["register-job-definition.json"]
    assert definition["type"] == "container"
    container = read_container(plan)
    assert {item["type"]: item["value"] for item in container["resourceRequirements"]} == {
        "VCPU": "96",
        "MEMORY": str(int(1152 * 1024 * 0.9)),
        "GPU": "8",
    }
    assert "devices" not in container["linuxParameters"], "EFA is for several nodes"
    assert container["linuxParameters"]["sharedMemorySize"] == 288 * 1024
    assert "instanceType" not in container, "it is valid for multi-node jobs only"


@pytest.mark.parametrize(
    ("instance", "nodes", "devices"),
    [
        ("p4d.24xlarge", 2, {"/dev/infiniband/uverbs": 4}),
        ("p5.48xlarge", 2, {"/dev/infiniband/uverbs": 32}),
        ("p5en.48xlarge", 2, {"/dev/infiniband/uverbs": 16}),
        ("trn1.32xlarge", 2, {"/dev/infiniband/uverbs": 8, "/dev/neuron": 16}),
        ("trn1n.32xlarge", 2, {"/dev/infiniband/uverbs": 16, "/dev/neuron": 16}),
        ("trn1.32xlarge", 1, {"/dev/neuron": 16}),
        (
            "dl1.24xlarge",
            2,
            {
                "/dev/infiniband/uverbs": 4,
                "/dev/accel/accel": 8,
                "/dev/accel/accel_controlD": 8,
            },
        ),
        ("c7i.4xlarge", 2, {}),
    ],
)
def test_devices_of_accelerators_and_efa_are_listed(
    instance: str, nodes: int, devices: dict[str, int]
) -> None:
    container = read_container(build_plan(instance=instance, max_nodes=nodes))
    paths = [item["hostPath"] for item in container["linuxParameters"].get("devices", [])]
    assert paths == [
        path
        for prefix in sorted(devices, key=lambda key: (key.startswith("/dev/infini"), key))
        for path in (f"{prefix}{index}" for index in range(devices[prefix]))
    ]


def test_variables_of_the_user_take_precedence() -> None:
    plan = build_plan(max_nodes=2, environment={"FI_PROVIDER": "tcp", "A": "1"})
    variables = {item["name"]: item["value"] for item in read_container(plan)["environment"]}
    assert variables["FI_PROVIDER"] == "tcp"
    assert variables["FI_EFA_USE_DEVICE_RDMA"] == "1"
    assert variables["A"] == "1"


def test_secrets_are_references_everywhere() -> None:
    plan = build_plan({"execution_role": ROLE, "stack": STACK}, secrets={"TOKEN": REFERENCE})
    assert read_container(plan)["secrets"] == [{"name": "TOKEN", "valueFrom": REFERENCE}]
    template = read_contents(plan)["batch-stack.json"]["Resources"]["ExecutionRole"]
    statement = template["Properties"]["Policies"][0]["PolicyDocument"]["Statement"][0]
    assert statement["Resource"] == [REFERENCE]


@pytest.mark.parametrize(
    ("code", "status_reason", "action"),
    [
        *((code, "Essential container in task exited", "RETRY") for code in (75, 76, 143)),
        *((code, "Essential container in task exited", "EXIT") for code in (1, 2, 64, 66, 67, 137)),
        (None, "Host EC2 (instance i-0123) terminated.", "RETRY"),
        (137, "Host EC2 (instance i-0123) terminated.", "RETRY"),
        (None, "CannotPullContainerError: not found", "EXIT"),
    ],
)
def test_the_retry_strategy_follows_the_exit_codes(
    code: int | None, status_reason: str, action: str
) -> None:
    definition = read_contents(build_plan())["register-job-definition.json"]
    strategy = definition["retryStrategy"]
    assert strategy["attempts"] == 3
    assert decide(strategy, code, status_reason, "") == action
    assert RESTART_CODES == (75, 76, 143)


def test_a_strategy_without_a_final_rule_retries_everything() -> None:
    rules = {"evaluateOnExit": [{"action": "RETRY", "onExitCode": "75"}]}
    assert decide(rules, 64, "", "") == "RETRY"


def test_an_array_has_its_size_in_the_submission() -> None:
    contents = read_contents(SPECS["array"]())
    assert contents["submit-job.json"]["arrayProperties"] == {"size": 4}
    assert contents["register-job-definition.json"]["type"] == "container"


def test_node_commands_are_read_from_the_requests() -> None:
    leader = LeaderAddress("10.0.0.1", 1234, "job")
    plan = build_plan(max_nodes=2, environment={"A": "1"})
    main, child = build_target().list_node_commands(plan, leader)
    assert main.command == child.command == ("regauge", "train", "/workspace/run.toml")
    assert "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS" not in main.environment
    assert child.environment["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] == "10.0.0.1"
    assert child.environment["AWS_BATCH_JOB_NUM_NODES"] == "2"
    assert child.environment["A"] == "1"
    assert child.environment["MASTER_PORT"] == "1234"
    array = build_target().list_node_commands(SPECS["array"](), leader)
    assert [node.environment["AWS_BATCH_JOB_ARRAY_INDEX"] for node in array] == list("0123")


# The stack


def test_the_queue_limits_the_time_of_a_job_that_cannot_start() -> None:
    queue = read_contents(build_plan({"stack": STACK | {"pending_minutes": 30}}))
    actions = queue["create-job-queue.json"]["jobStateTimeLimitActions"]
    assert {item["reason"].partition(":")[0] for item in actions} == {
        "CAPACITY",
        "MISCONFIGURATION",
    }
    assert [item["maxTimeSeconds"] for item in actions] == [1800, 600, 600]


def test_a_reservation_has_no_placement_group() -> None:
    contents = read_contents(SPECS["reservation"]())
    assert "placementGroup" not in contents["create-compute-environment.json"]["computeResources"]
    data = contents["create-launch-template.json"]["LaunchTemplateData"]
    target = data["CapacityReservationSpecification"]["CapacityReservationTarget"]
    assert target == {"CapacityReservationId": "cr-1"}


def test_the_machine_mounts_lustre_and_gives_containers_time_to_stop() -> None:
    volume = build_volume("fast", "/fast", "fs-0123456789abcdef0/abcde", "fsx")
    plan = build_plan({"stack": STACK, "region": "eu-west-1"}, volumes=(volume,))
    data = read_contents(plan)["create-launch-template.json"]["LaunchTemplateData"]
    text = base64.b64decode(data["UserData"]).decode()
    address = "fs-0123456789abcdef0.fsx.eu-west-1.amazonaws.com@tcp:/abcde"
    assert f"mount_or_stop {address} /mnt/fast\n" in text
    assert "ECS_CONTAINER_STOP_TIMEOUT=120s" in text
    host = read_container(build_plan(volumes=(volume,), output="/fast/o"))["volumes"][0]["host"]
    assert host == {"sourcePath": "/mnt/fast"}


def test_a_container_writes_the_run_file_and_becomes_the_command(tmp_path: Path) -> None:
    """The words of the command and the bytes of the run file are those of the job."""
    program, path = tmp_path / "regauge", tmp_path / "not there" / "run.toml"
    program.write_text('#!/bin/sh\necho $$\nprintf "<%s>" "$@" "${REGAUGE_RUN_FILE-unset}"\n')
    program.chmod(0o755)
    text = 'a = "%s $HOME `id` \\n"\n# é\n\n'
    words = ("train", str(path), "b = '$c'", "", "-c")
    plan = build_plan(command=("regauge", *words), run_file_text=text, environment={"A": "b"})
    container = read_container(plan)
    variables = {item["name"]: item["value"] for item in container["environment"]}
    variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    process = subprocess.Popen(container["command"], env=variables, stdout=subprocess.PIPE)
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 0
    expected = "".join(f"<{word}>" for word in (*words, "unset"))
    assert output == f"{process.pid}\n{expected}", "the command gets the signals of its container"
    assert path.read_bytes() == text.encode()
    assert [item.name for item in path.parent.iterdir()] == ["run.toml"]


def test_a_run_file_that_a_job_definition_cannot_contain_is_refused() -> None:
    build_plan(run_file_text="#" * 20_000)
    message = r"has 25,\d\d\d bytes, 24,002 of them the run file, and AWS Batch allows 24,576"
    with pytest.raises(SettingsError, match=message):
        build_plan(run_file_text="#" * 24_000)
    with pytest.raises(SettingsError, match="30,002 of them the run file"):
        build_plan(run_file_text="é" * 5_000)  # six bytes each in the request


@pytest.mark.parametrize("is_mounted", [True, False])
def test_a_machine_without_its_file_system_stops(tmp_path: Path, *, is_mounted: bool) -> None:
    """It would join the queue, and Docker would create the missing folder on the root disk."""
    volume = build_volume("fast", "/fast", "fs-0123456789abcdef0/abcde", "fsx")
    plan = build_plan({"stack": STACK, "region": "eu-west-1"}, volumes=(volume,))
    data = read_contents(plan)["create-launch-template.json"]["LaunchTemplateData"]
    script = base64.b64decode(data["UserData"]).decode().partition("\n#!/bin/bash\n")[2]
    programs = {"mount": int(not is_mounted), "shutdown": 0, "dnf": 0, "mkdir": 0, "sleep": 0}
    for name, code in programs.items():
        (tmp_path / name).write_text(
            f'#!/bin/bash\necho "{name} $*" >>{tmp_path}/calls\nexit {code}'
        )
        (tmp_path / name).chmod(0o755)
    script = script.partition("--==REGAUGE==--")[0].replace("/etc/ecs", str(tmp_path))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.run(["bash", "-c", script], env=environment, check=False)  # noqa: S607
    calls = (tmp_path / "calls").read_text()
    assert ("shutdown -h now" in calls) != is_mounted
    assert (process.returncode == 0) == is_mounted
    assert calls.count("mount -t lustre -o relatime,flock") == (1 if is_mounted else 6)


# Settings that cannot work


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"queue": None}, {}, "target 'aws-batch' needs a queue; set it"),
        ({}, {"machine": None}, "launch.instance is not set"),
        ({}, {"image": None}, "launch.image is not set"),
        ({}, {"instance": "p5.4xlarge"}, "does not contain the vCPUs of p5.4xlarge; set vcpus"),
        ({"vcpus": 4}, {"instance": "p5.4xlarge"}, "the memory of p5.4xlarge; set memory_gib"),
        ({}, {"hours": 0.01}, "launch.hours = 0.01 is below the minimum"),
        ({}, {"jobs": 2, "max_nodes": 2}, "an array job of AWS Batch has one node per job"),
        ({}, {"jobs": 20_000}, "launch.jobs = 20000 is above the maximum"),
        ({}, {"environment": {"AWS_BATCH_X": "1"}}, "launch.environment has AWS_BATCH_X"),
        ({}, {"labels": {"a;b": "1"}}, "'a;b' with value '1' is not an AWS tag"),
        ({}, {"labels": {"aws:a": "1"}}, "is not an AWS tag"),
        ({}, {"volumes": (CLAIM,)}, "kind 'claim', which AWS Batch lacks; set its kind to efs"),
        ({}, {"volumes": (LUSTRE,)}, "'fs-1' of 'v' is not the source of FSx for Lustre; write"),
    ],
)
def test_a_job_that_batch_cannot_run_is_refused(
    settings: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        build_plan(settings, **changes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"region": "mars"}, "'mars' is not an AWS region"),
        ({"job_role": "role"}, "'role' is not a role ARN"),
        ({"share_identifier": "a b"}, "'a b' is not a share identifier"),
        ({"scheduling_priority": 10_000}, "scheduling_priority"),
        ({"stack": STACK | {"subnets": {}}}, "it is empty; name at least one"),
        ({"stack": STACK | {"pending_minutes": 5}}, "pending_minutes"),
        ({"stack": STACK | {"name": "a/b"}}, "'a/b' is not a stack name"),
        ({"stack": STACK | {"fair_share": {"weights": {"a": 0}}}}, "the weight 0 of 'a'"),
        ({"stack": STACK | {"fair_share": {"weights": {"-": 1}}}}, "'-' is not a share identifier"),
    ],
)
def test_an_invalid_setting_of_the_target_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        build_target(**settings)


def test_a_changing_number_of_nodes_is_refused_with_the_alternative() -> None:
    run_file = ROOT / "runs" / "batch-ranker.toml"
    request, settings = read_request(run_file, "train", ("execution.nodes.count=1:4",))
    with pytest.raises(SettingsError, match=r"set execution\.nodes\.count to 4") as error:
        plan_job(request, settings.launch, select_launcher(settings.launch, "aws_batch"))
    assert "kubernetes" in str(error.value)


def test_spot_without_a_stack_has_no_effect() -> None:
    assert "spot" not in build_plan().used
    assert "spot" in build_plan({"stack": STACK}).used


def test_a_plan_imports_neither_torch_nor_boto3() -> None:
    code = (
        "import sys; from regauge.cli import main; code = main(['launch', "
        "'runs/batch-ranker.toml', 'train', '--on', 'aws_batch', '--dry-run', '-o', 'json']); "
        "print(code, {'torch', 'boto3', 'botocore'} & sys.modules.keys(), file=sys.stderr)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert process.stderr.splitlines()[-1] == "0 set()"
    assert json.loads(process.stdout)["price"].startswith("43.00 USD per hour")


# Lints


def lint_codes(plan: LaunchPlan) -> list[str]:
    return [lint.code for lint in run_lints(plan)]


def change(plan: LaunchPlan, edit: Callable[[Contents], None], **changes: Any) -> LaunchPlan:
    contents = read_contents(plan)
    edit(contents)
    documents = tuple(Document(name, content) for name, content in contents.items())
    return replace(plan, documents=documents, job=replace(plan.job, **changes))


def edit_retry(**values: Any) -> Callable[[Contents], None]:
    return lambda contents: contents["register-job-definition.json"]["retryStrategy"].update(values)


def edit_container(edit: Callable[[Contents], None]) -> Callable[[Contents], None]:
    def apply(contents: Contents) -> None:
        nodes = contents["register-job-definition.json"]["nodeProperties"]
        edit(nodes["nodeRangeProperties"][0]["container"])

    return apply


def add_other_type(contents: Contents) -> None:
    """Add a second range of nodes with another machine type."""
    ranges = contents["register-job-definition.json"]["nodeProperties"]["nodeRangeProperties"]
    ranges.append(deepcopy(ranges[0]))
    ranges[1]["container"]["instanceType"] = "p5.48xlarge"


def drop(document: str, *path: str) -> Callable[[Contents], None]:
    """Return an edit that removes a field of a document."""

    def apply(contents: Contents) -> None:
        target = contents[document]
        for name in path[:-1]:
            target = target[name]
        target.pop(path[-1])

    return apply


RETRY, EXIT = {"action": "RETRY", "onExitCode": "75"}, {"action": "EXIT", "onReason": "*"}
EXIT_64 = {"action": "EXIT", "onExitCode": "64"}
RESERVED = {"capacity_reservation": {"id": "cr-1", "zone": "us-east-1b"}}
SHARED = {"stack": STACK | {"fair_share": {"weights": {"a*": 1}}}, "share_identifier": "abc"}
WEIGHTS = {"fair_share": {"weights": {f"a{number}": 1 for number in range(501)}}}
TYPES = {"instance_types": ("p4d.24xlarge", "p5.48xlarge")}
ZONES = {"subnets": {"subnet-1": "us-east-1a", "subnet-2": "us-east-1b"}}
PLACEMENT = drop("create-compute-environment.json", "computeResources", "placementGroup")
ACTIONS = drop("create-job-queue.json", "jobStateTimeLimitActions")
DEVICES = edit_container(lambda item: item["linuxParameters"].pop("devices"))
DEVICE = edit_container(lambda item: item["linuxParameters"]["devices"].pop())
SSM = {"A": "arn:aws:ssm:us-east-1:123456789012:parameter/a"}


def edit_rules(*rules: dict[str, str]) -> LaunchPlan:
    return change(build_plan(), edit_retry(evaluateOnExit=list(rules)))


FINDINGS: list[tuple[str, Callable[[], LaunchPlan]]] = [
    ("batch-final-exit", lambda: edit_rules(RETRY)),
    ("batch-final-exit", edit_rules),
    ("batch-final-exit", lambda: edit_rules(RETRY, EXIT_64)),
    ("batch-retry-rules", lambda: edit_rules(*[RETRY] * 5, EXIT)),
    ("batch-attempts", lambda: build_plan(max_attempts=11)),
    ("batch-share", lambda: build_plan({"stack": STACK, "share_identifier": "a"})),
    ("batch-share", lambda: build_plan(SHARED | {"share_identifier": None})),
    ("batch-share-weight", lambda: build_plan(SHARED | {"share_identifier": "b"})),
    (
        "batch-share-count",
        lambda: build_plan({"stack": STACK | WEIGHTS, "share_identifier": "a1"}),
    ),
    ("batch-multi-node-spot", lambda: plan_stack({}, max_nodes=2, spot=True)),
    ("batch-mixed-instances", lambda: change(build_plan(max_nodes=2), add_other_type)),
    ("batch-mixed-instances", lambda: plan_stack(TYPES, max_nodes=2)),
    ("batch-instance-missing", lambda: plan_stack({"instance_types": ("p5.48xlarge",)})),
    (
        "batch-placement-reservation",
        lambda: plan_stack(RESERVED | {"placement_group": "group"}, max_nodes=2),
    ),
    ("batch-efa-placement", lambda: change(SPECS["stack"](), PLACEMENT)),
    ("batch-reservation-zone", lambda: plan_stack(RESERVED, max_nodes=2)),
    ("batch-zones", lambda: plan_stack(ZONES, max_nodes=2)),
    (
        "efa-count",
        lambda: replace(
            build_plan(max_nodes=2), job=build_spec(max_nodes=2, instance="c7i.4xlarge")
        ),
    ),
    ("efa-request", lambda: change(build_plan(max_nodes=2), DEVICES)),
    ("efa-count", lambda: change(build_plan(max_nodes=2), DEVICE)),
    ("batch-time-limits", lambda: change(SPECS["stack"](), ACTIONS)),
    (
        "batch-secret-value",
        lambda: build_plan({"execution_role": ROLE}, secrets={"TOKEN": "hf_0123456789"}),
    ),
    ("batch-secret-role", lambda: build_plan(secrets={"TOKEN": REFERENCE})),
    ("batch-output-volume", lambda: build_plan(output="out")),
    ("batch-output-volume", lambda: build_plan(output="/database/out", max_nodes=2)),
]
PASSES: dict[str, Callable[[], LaunchPlan]] = {
    "batch-share": lambda: build_plan(SHARED),
    "batch-multi-node-spot": lambda: plan_stack({}, spot=True),
    "batch-mixed-instances": lambda: plan_stack(TYPES),
    "batch-instance-missing": lambda: plan_stack({"instance_types": ("p4d",)}),
    "batch-placement-reservation": lambda: plan_stack(RESERVED, max_nodes=2),
    "batch-reservation-zone": SPECS["reservation"],
    "batch-zones": lambda: plan_stack(ZONES),
    "batch-secret-value": lambda: build_plan({"execution_role": ROLE}, secrets=SSM),
    "batch-attempts": lambda: build_plan(max_attempts=10),
    "batch-output-volume": lambda: build_plan(output="s3://bucket/out", max_nodes=2),
}


@pytest.mark.parametrize(
    ("code", "build"), FINDINGS, ids=[f"{code}-{n}" for n, (code, _) in enumerate(FINDINGS)]
)
def test_a_lint_is_triggered(code: str, build: Callable[[], LaunchPlan]) -> None:
    plan = build()
    assert code in lint_codes(plan)
    assert "hf_0123456789" not in str(run_lints(plan))


@pytest.mark.parametrize("code", sorted({code for code, _ in FINDINGS}))
def test_a_lint_is_not_triggered(code: str) -> None:
    plans = [*(build() for build in SPECS.values()), *([PASSES[code]()] if code in PASSES else [])]
    assert not [plan for plan in plans if code in lint_codes(plan)]


def test_plans_of_other_targets_have_no_findings() -> None:
    plan = LaunchPlan(build_spec(output="out"), (Document("job.sh", "#!/bin/sh\n"),))
    assert not [lint for check in lints_aws_batch.CHECKS for lint in check(plan)]


def test_an_error_refuses_the_job() -> None:
    with pytest.raises(
        SettingsError, match=r"more than 10 \(batch-attempts: https.*; set it to 10"
    ):
        check_lints(build_plan(max_attempts=11))


# States


def build_detail(status: str, **values: Any) -> Contents:
    """Return a job as DescribeJobs does."""
    return {"jobId": "id", "jobName": "run", "status": status, **values}


def attempt(
    code: int | None = None, reason: str = "Essential container in task exited"
) -> Contents:
    container = {} if code is None else {"exitCode": code}
    return {"container": container, "statusReason": reason, "startedAt": 1000, "stoppedAt": 3000}


LOST = attempt(None, "Host EC2 (instance i-1) terminated.")
EXCEEDED = {"statusReason": "Job attempt duration exceeded timeout"}
KILLED = {"reason": "OutOfMemoryError: Container killed", "exitCode": 137}
CANCELLED = {"statusReason": "cancelled by regauge job cancel", "isCancelled": True}
LIMIT = (
    "Canceled by JobStateTimeLimit action due to reason: CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
)


@pytest.mark.parametrize(
    ("detail", "state"),
    [
        (build_detail("SUBMITTED"), "pending"),
        (build_detail("PENDING"), "pending"),
        (build_detail("RUNNABLE"), "pending"),
        (build_detail("STARTING"), "starting"),
        (build_detail("RUNNING"), "running"),
        (build_detail("RUNNABLE", attempts=[attempt(75)]), "restarting"),
        (build_detail("STARTING", attempts=[attempt(75)]), "restarting"),
        (build_detail("RUNNABLE", attempts=[attempt(143)]), "preempted"),
        (build_detail("RUNNABLE", attempts=[LOST]), "preempted"),
        (build_detail("RUNNING", attempts=[LOST]), "running"),
        (build_detail("SUCCEEDED", attempts=[attempt(0)]), "succeeded"),
        (build_detail("FAILED", attempts=[attempt(64)]), "failed"),
        (build_detail("FAILED", **CANCELLED), "cancelled"),
        (build_detail("FAILED", isTerminated=True), "cancelled"),
        (build_detail("FAILED", isCancelled=True, statusReason=LIMIT), "failed"),
        (build_detail("PENDING", arrayProperties={"statusSummary": {"RUNNING": 1}}), "running"),
        (build_detail("PENDING", arrayProperties={"statusSummary": {"SUCCEEDED": 2}}), "pending"),
        (build_detail("NEW"), "unknown"),
    ],
)
def test_a_status_of_batch_is_a_state(detail: Contents, state: str) -> None:
    assert find_state(detail) == state


HANDLE = Handle("aws-batch", "us-east-1", "id")


@pytest.mark.parametrize(
    ("detail", "kind", "message"),
    [
        (build_detail("FAILED", attempts=[attempt(64)]), "unknown", "exit code 64; Essential"),
        (build_detail("FAILED", attempts=[attempt(143)]), "preempted", "exit code 143"),
        (build_detail("FAILED", attempts=[LOST]), "node", "Host EC2 (instance i-1) terminated."),
        (build_detail("FAILED", statusReason=LIMIT), "unknown", "CAPACITY:INSUFFICIENT"),
        (
            build_detail("FAILED", attempts=[attempt(143)], isTerminated=True, **EXCEEDED),
            "limit",
            "exceeded timeout",
        ),
        (build_detail("FAILED", container=KILLED), "memory", "exit code 137; OutOfMemoryError"),
    ],
)
def test_a_failure_has_a_kind_and_a_message(detail: Contents, kind: str, message: str) -> None:
    failure = build_status(HANDLE, detail, []).failure
    assert failure is not None
    assert failure.kind == kind
    assert message in failure.message


def test_the_status_of_a_multi_node_job_has_its_nodes_and_the_frozen_price() -> None:
    tags = {"regauge-usd-per-hour": "43.9", "regauge-price-date": "2026-07-20"}
    main = {"nodeDetails": {"isMainNode": True}, "attempts": [attempt(64)]}
    children = [build_detail("FAILED", **main), build_detail("FAILED", attempts=[LOST])]
    detail = build_detail("FAILED", tags=tags, createdAt=1000, startedAt=2000, stoppedAt=3000)
    status = build_status(HANDLE, detail, children)
    assert (status.state, status.exit_code) == ("failed", 64)
    assert [node.exit_code for node in status.nodes] == [64, None]
    assert status.usd_per_hour == pytest.approx(43.9)
    assert status.price_date == "2026-07-20"
    assert status.submitted_at == "1970-01-01T00:00:01+00:00"
    assert status.failure is not None
    assert status.failure.node == 0


def test_a_running_attempt_has_no_exit_code_and_no_reason_of_an_earlier_one() -> None:
    child = build_detail(
        "RUNNING",
        attempts=[attempt(75)],
        container={
            "exitCode": 75,
            "containerInstanceArn": "arn:aws:ecs:r:a:container-instance/c/i1",
        },
    )
    status = build_status(HANDLE, child, [child])
    assert (status.reason, status.exit_code, status.attempt) == ("", None, 2)
    (node,) = status.nodes
    assert (node.state, node.host, node.exit_code, node.reason) == ("running", "i1", None, "")
    query = "aws ecs describe-container-instances --region r --cluster c --container-instances "
    query += "arn:aws:ecs:r:a:container-instance/c/i1 --output text --query "
    query += "'containerInstances[0].ec2InstanceId'"
    assert status.shell_command == f"aws ssm start-session --region r --target $({query})"
    waiting = build_status(HANDLE, child | {"status": "RUNNABLE"}, [])
    assert waiting.shell_command == ""
    assert (waiting.state, waiting.attempt) == ("restarting", 1)
    assert waiting.reason == "Essential container in task exited"


def test_events_are_sorted_by_time() -> None:
    detail = build_detail(
        "SUCCEEDED",
        createdAt=500,
        stoppedAt=9000,
        attempts=[LOST, attempt(0) | {"startedAt": 4000}],
    )
    detail["attempts"][1]["stoppedAt"] = 8000
    events = list_job_events(detail)
    assert [event.message for event in events] == [
        "job run submitted to its queue",
        "attempt 1 started",
        "attempt 1 ended: Host EC2 (instance i-1) terminated.",
        "attempt 2 started",
        "attempt 2 ended with exit code 0: Essential container in task exited",
        "job succeeded: Essential container in task exited",
    ]
    assert events[0].time == "1970-01-01T00:00:00+00:00"


# Logs


def test_the_log_of_an_attempt_is_selected() -> None:
    streams = [{"container": {"logStreamName": name}} for name in ("s/1", "s/2")]
    options = {"logConfiguration": {"options": {"awslogs-group": "/logs"}}}
    detail = build_detail("RUNNING", attempts=streams, container=options | {"logStreamName": "s/3"})
    assert find_log_stream(detail, None) == ("/logs", "s/3")
    assert find_log_stream(detail, 1) == ("/logs", "s/1")
    with pytest.raises(SettingsError, match="has no log of attempt 4"):
        find_log_stream(detail, 4)
    with pytest.raises(SettingsError, match="has no log: its status is RUNNABLE"):
        find_log_stream(build_detail("RUNNABLE"), None)


TWO_NODES = build_detail("RUNNING", nodeProperties={"numNodes": 2})
EIGHT_RANKS = TWO_NODES | {"tags": {"regauge-processes": "8"}}


@pytest.mark.parametrize(
    ("detail", "rank", "job_id"),
    [
        (build_detail("RUNNING"), None, "id"),
        (TWO_NODES, None, "id#0"),
        (EIGHT_RANKS, 9, "id#1"),
        (build_detail("RUNNING", arrayProperties={"size": 3}), 2, "id:2"),
    ],
)
def test_the_node_of_a_rank_is_selected(detail: Contents, rank: int | None, job_id: str) -> None:
    assert select_child(detail, rank) == job_id


def test_an_unknown_rank_is_refused() -> None:
    with pytest.raises(SettingsError, match="has no rank 16; set --rank to 0 to 15"):
        select_child(EIGHT_RANKS, 16)


class PagedLogs:
    """GetLogEvents with two pages; the second one appears after the job has ended."""

    def __init__(self) -> None:
        self.tokens: list[str | None] = []

    def call(self, operation: str, **request: Any) -> Contents:
        """Return a page of events."""
        assert operation == "get_log_events"
        token = request.get("nextToken")
        self.tokens.append(token)
        pages = {None: (["a", "b\n"], "1"), "1": (["c"], "2"), "2": ([], "2")}
        lines, following = pages[token]
        return {"events": [{"message": line} for line in lines], "nextForwardToken": following}


def test_all_pages_of_a_log_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regauge.jobs.targets._aws_batch.jobs.PAUSE_SECONDS", 0.0)
    logs: Any = PagedLogs()
    assert list(read_stream(logs, "g", "s", describe=None)) == ["a", "b", "c"]
    states = iter(["RUNNING", "SUCCEEDED"])
    logs = PagedLogs()
    lines = list(read_stream(logs, "g", "s", describe=lambda: {"status": next(states)}))
    assert lines == ["a", "b", "c"]
    assert len(logs.tokens) == 5, "it polls once more after the end"


# Calls of AWS


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


def test_a_missing_boto3_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(PreflightError, match=r"pip install 'regauge\[aws\]'"):
        AwsClient("batch", "us-east-1", "launch.target.region")


def test_missing_credentials_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)  # it keeps the credentials of other tests
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with (
        AwsClient("batch", "us-east-1", "launch.target.region") as aws,
        pytest.raises(PreflightError, match=r"AWS credentials are missing: .*; set AWS_PROFILE"),
    ):
        aws.call("describe_jobs", jobs=["id"])


def test_an_unreachable_service_is_reported(
    monkeypatch: pytest.MonkeyPatch, credentials: None
) -> None:
    del credentials
    monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", "http://127.0.0.1:9")
    monkeypatch.setattr(aws_client, "MAX_TRIES", 1)
    with (
        AwsClient("batch", "us-east-1", "launch.target.region") as aws,
        pytest.raises(
            TransientError, match=r"AWS batch in us-east-1 is unreachable: .*; check the"
        ),
    ):
        aws.call("describe_jobs", jobs=["id"])


@pytest.mark.parametrize(
    ("code", "status", "message", "kind", "remedy"),
    [
        ("ExpiredTokenException", 400, "expired", PreflightError, "renew the AWS credentials"),
        ("UnrecognizedClientException", 403, "x", PreflightError, "renew the AWS credentials"),
        ("AccessDeniedException", 403, "no", PreflightError, "allow batch:SubmitJob"),
        ("ThrottlingException", 400, "slow", TransientError, "try again later"),
        ("ServerException", 500, "oops", TransientError, "try again later"),
        ("ClientException", 400, "You exceeded the quota", SettingsError, "a higher quota"),
        ("ClientException", 400, "wrong", SettingsError, "correct the setting"),
    ],
)
def test_an_answer_with_an_error_is_one_of_regauge(
    code: str, status: int, message: str, kind: type[Exception], remedy: str, credentials: None
) -> None:
    del credentials
    from botocore.exceptions import ClientError

    answer: Any = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    with AwsClient("batch", "us-east-1", "launch.target.region") as aws:
        error = aws._convert(ClientError(answer, "SubmitJob"), "submit_job")
    assert type(error) is kind
    assert message in str(error)
    assert remedy in str(error)


def test_the_cost_of_running_machines_is_reported() -> None:
    tags = {
        "regauge-usd-per-machine-hour": "21.5",
        "regauge-machine-vcpus": "128",
        "regauge-price-date": "2026-07-20",
    }
    environment = {"computeResources": {"desiredvCpus": 256, "minvCpus": 128}, "tags": tags}
    text = jobs.describe_machines(environment)
    assert text == (
        "256 vCPUs run now, 128 keep running without a job; "
        "about 43.00 USD per hour (price of 2026-07-20)"
    )
    assert "USD" not in jobs.describe_machines({"computeResources": {"desiredvCpus": 0}})
