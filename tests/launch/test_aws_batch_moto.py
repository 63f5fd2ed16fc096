"""Jobs and the stack of AWS Batch: on moto, which implements the API here, and in cfn-lint."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

from regauge.jobs.job_spec import find_machine
from regauge.jobs.targets import Handle, JobSpec, LaunchPlan
from regauge.jobs.targets.aws_batch import AwsBatch
from regauge.system.errors import SettingsError
from regauge.system.timing import wait_for
from unit.test_launch_aws_batch import EXAMPLES, plan_example

REGION = "us-east-1"
ACCOUNT = "123456789012"
RESERVATION = {"id": "cr-0123456789abcdef0", "zone": "us-east-1a"}


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace AWS by moto; its jobs of Batch succeed at once, without containers."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "moto")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    with mock_aws(config={"batch": {"use_docker": False}}):
        yield


def create_network() -> tuple[str, str]:
    """Create a subnet and a security group; return their identifiers."""
    ec2 = boto3.client("ec2", REGION)
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/24")["Subnet"]["SubnetId"]
    group = ec2.create_security_group(GroupName="g", Description="g", VpcId=vpc)["GroupId"]
    ec2.close()
    return subnet, group


def build_target(**settings: Any) -> AwsBatch:
    subnet, group = create_network()
    stack = {"name": "regauge", "subnets": {subnet: "us-east-1a"}, "security_groups": (group,)}
    return AwsBatch(stack=stack | settings)


def build_plan(target: AwsBatch, **changes: Any) -> LaunchPlan:
    values: dict[str, Any] = {
        "name": "run",
        "verb": "train",
        "command": ("regauge", "train", "/workspace/run.toml"),
        "min_nodes": changes.get("max_nodes", 1),
        "max_nodes": 1,
        "processes": 1,
        "machine": find_machine("c7i.4xlarge", {}),
        "image": "registry.example/regauge:0.1.0",
    }
    return target.plan(JobSpec(**values | changes))


def create_stack(plan: LaunchPlan) -> dict[str, str]:
    """Create the stack of a plan; return the identifiers of its resources."""
    contents = {document.name: deepcopy(document.content) for document in plan.documents}
    template = contents["batch-stack.json"]
    # moto requires a service role; AWS has a service-linked role for Batch.
    role = {"Fn::GetAtt": ["InstanceRole", "Arn"]}
    template["Resources"]["ComputeEnvironment"]["Properties"]["ServiceRole"] = role
    cloudformation = boto3.client("cloudformation", REGION)
    cloudformation.create_stack(
        StackName="regauge",
        TemplateBody=json.dumps(template),
        Capabilities=["CAPABILITY_NAMED_IAM"],
    )
    response = cloudformation.describe_stack_resources(StackName="regauge")
    cloudformation.close()
    return {
        item["LogicalResourceId"]: item["PhysicalResourceId"] for item in response["StackResources"]
    }


def test_the_stack_creates_a_queue_that_a_job_runs_on(aws: None) -> None:
    del aws
    target = build_target()
    plan = build_plan(target)
    resources = create_stack(plan)
    assert {"ComputeEnvironment", "JobQueue", "LaunchTemplate", "InstanceProfile"} <= set(resources)
    handle = target.submit(plan)
    assert (handle.target, handle.context) == ("aws-batch", REGION)
    status = target.find_status(handle)
    assert status.state == "succeeded"
    assert status.usd_per_hour == pytest.approx(0.714)
    assert status.price_date == "2026-07-20"
    names = [leftover.name for leftover in target.clean_up(handle)]
    assert any("job-queue/regauge" in name for name in names)
    assert any("compute-environment/regauge" in name for name in names)
    with closing(boto3.client("batch", REGION)) as batch:
        definitions = batch.describe_job_definitions(jobDefinitionName="run")["jobDefinitions"]
    assert [item["status"] for item in definitions] == ["INACTIVE"]


def test_the_stages_of_a_pipeline_wait_for_each_other(aws: None) -> None:
    del aws
    target = build_target()
    jobs = tuple(
        build_plan(target, name=f"run-{stage}", stage=stage, after=after).job
        for stage, after in (("train", ""), ("gate", "run-train"), ("promote", "run-gate"))
    )
    plan = target.plan(replace(jobs[0], name="run", verb="pipeline", stage="", stages=jobs))
    create_stack(plan)
    handle = target.submit(plan)
    with closing(boto3.client("batch", REGION)) as batch:
        stages = target.find_status(handle).stages
        ids = [Handle.parse(stage.handle).job_id for stage in stages]
        details = batch.describe_jobs(jobs=ids)["jobs"]
    assert [stage.name for stage in stages] == ["train", "gate", "promote"]
    assert [item["dependsOn"] for item in details] == [
        [],
        [{"jobId": ids[0]}],
        [{"jobId": ids[1]}],
    ]
    assert wait_for(lambda: target.find_status(handle).is_final, 60.0, poll_seconds=0.5)
    assert target.find_status(handle).state == "succeeded"
    target.clean_up(handle)
    with closing(boto3.client("batch", REGION)) as batch:
        definitions = batch.describe_job_definitions()["jobDefinitions"]
    assert [item["status"] for item in definitions] == ["INACTIVE"] * 3


def test_the_requests_of_the_stack_are_accepted(aws: None) -> None:
    del aws
    target = build_target(pending_minutes=30)
    contents = {item.name: item.content for item in build_plan(target, spot=True).documents}
    iam = boto3.client("iam", REGION)
    iam.create_role(RoleName="regauge-instance", AssumeRolePolicyDocument="{}")
    profile = iam.create_instance_profile(InstanceProfileName="regauge-instance")
    environment = contents["create-compute-environment.json"]
    environment["computeResources"]["instanceRole"] = profile["InstanceProfile"]["Arn"]
    environment["serviceRole"] = iam.get_role(RoleName="regauge-instance")["Role"]["Arn"]
    iam.close()
    with closing(boto3.client("ec2", REGION)) as ec2:
        ec2.create_launch_template(**contents["create-launch-template.json"])
    with closing(boto3.client("batch", REGION)) as batch:
        created = batch.create_compute_environment(**environment)
        queue = contents["create-job-queue.json"]
        batch.create_job_queue(**queue)
        (stored,) = batch.describe_job_queues(jobQueues=["regauge"])["jobQueues"]
    assert created["computeEnvironmentName"] == "regauge"
    assert stored["jobQueueName"] == "regauge"


def test_an_image_that_its_registry_lacks_is_refused(aws: None) -> None:
    del aws
    target = build_target()
    image = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/regauge:1.0"
    plan = build_plan(target, image=image)
    create_stack(plan)
    with pytest.raises(SettingsError, match="is not in its registry; push it, or correct"):
        target.submit(plan)
    with closing(boto3.client("ecr", REGION)) as ecr:
        ecr.create_repository(repositoryName="regauge")
        with pytest.raises(SettingsError, match="is not in its registry"):
            target.submit(plan)
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        config = {"digest": "sha256:" + "0" * 64}
        manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "config": config})
        ecr.put_image(repositoryName="regauge", imageManifest=manifest, imageTag="1.0")
    assert target.find_status(target.submit(plan)).state == "succeeded"


def test_an_unknown_queue_registers_nothing(aws: None) -> None:
    del aws
    target = AwsBatch(queue="other")
    with pytest.raises(SettingsError, match="there is no job queue 'other'"):
        target.submit(build_plan(target))
    with closing(boto3.client("batch", REGION)) as batch:
        assert batch.describe_job_definitions()["jobDefinitions"] == []


def test_a_multi_node_definition_is_accepted(aws: None) -> None:
    del aws
    target = build_target()
    content = build_plan(target, max_nodes=2).documents[0].content
    with closing(boto3.client("batch", REGION)) as batch:
        response = batch.register_job_definition(**content)
        (stored,) = batch.describe_job_definitions(jobDefinitions=[response["jobDefinitionArn"]])[
            "jobDefinitions"
        ]
    assert stored["type"] == "multinode"
    actions = [rule["action"].upper() for rule in stored["retryStrategy"]["evaluateOnExit"]]
    assert actions == ["RETRY"] * 4 + ["EXIT"]


def test_cfn_lint_accepts_the_template_of_every_example(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("cfn-lint")
    if not program.exists():
        pytest.skip("no cfn-lint here (pip install cfn-lint): the templates are not proved")
    stack = {"name": "regauge", "subnets": {"subnet-12345678": "us-east-1a"}}
    stack |= {"security_groups": ("sg-12345678",), "capacity_reservation": RESERVATION}
    target = AwsBatch(stack=stack, log_group="/regauge/logs")
    machine = find_machine("p4d.24xlarge", {})
    plans = {
        "reserved": build_plan(target, max_nodes=2, machine=machine),
        "spot": build_plan(target, spot=True, secrets={"A": f"arn:aws:ssm:{REGION}:{ACCOUNT}:a"}),
        **{name: plan_example(name) for name in EXAMPLES},
    }
    paths = []
    for name, plan in plans.items():
        paths.append(tmp_path / f"{name}.json")
        contents = {document.name: document.content for document in plan.documents}
        paths[-1].write_text(json.dumps(contents["batch-stack.json"]))
    command = [str(program), *map(str, paths)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
    broken = json.loads(paths[0].read_text())
    broken["Resources"]["JobQueue"]["Properties"]["Priority"] = "high"
    paths[0].write_text(json.dumps(broken))
    process = subprocess.run(command[:2], capture_output=True, text=True, check=False)
    assert process.returncode != 0, "cfn-lint accepts a text as a priority"
