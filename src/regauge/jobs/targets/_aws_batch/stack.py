"""A stack's machines and queue, as requests and as a CloudFormation template."""

from __future__ import annotations

import base64
import re
from typing import Any

from regauge.jobs.targets import JobSpec
from regauge.jobs.targets._aws_batch.container import (
    HOST_MOUNTS,
    TEMPLATES,
    find_batch_devices,
    require_machine,
)
from regauge.jobs.targets._aws_batch.documents import TAG_PREFIX
from regauge.jobs.targets._aws_batch.settings import DEFAULT_LOG_GROUP, BatchSettings, BatchStack
from regauge.jobs.targets._lustre import LustreSource
from regauge.jobs.targets._templates import render_document

TEMPLATE_FILE = "batch-stack.json"
SECRET_ACTIONS = {"secretsmanager": "secretsmanager:GetSecretValue", "ssm": "ssm:GetParameters"}
UNKNOWN_POLICY = "<ARN that create-scheduling-policy returns>"
_ACCOUNT = re.compile(r":(\d{12}):")
Documents = dict[str, Any]


def build_stack(job: JobSpec, target: BatchSettings, stack: BatchStack) -> Documents:
    """Return file name -> request that creates the job's stack, and the template."""
    image = find_batch_devices(require_machine(job).vendor).image_parameter
    group = _find_placement_group(job, stack)
    role, has_policy = f"{stack.name}-instance", stack.fair_share is not None
    names = {
        "instance_role": role,
        "placement_group": group,
        "launch_template": {"launchTemplateName": stack.name, "version": "$Latest"},
        "image": stack.image_id,
        "environment": stack.name,
        "policy": _name_policy(target, stack) if has_policy else None,
    }
    references = {
        "instance_role": {"Fn::GetAtt": ["InstanceProfile", "Arn"]},
        "placement_group": stack.placement_group or (group and {"Ref": "PlacementGroup"}),
        "launch_template": {
            "launchTemplateId": {"Ref": "LaunchTemplate"},
            "version": {"Fn::GetAtt": ["LaunchTemplate", "LatestVersionNumber"]},
        },
        "image": stack.image_id or (f"{{{{resolve:ssm:{image}}}}}" if image else None),
        "environment": {"Ref": "ComputeEnvironment"},
        "policy": {"Ref": "SchedulingPolicy"} if has_policy else None,
    }
    resources = [
        _capitalize_keys(request)
        for request in _render_requests(job, target, stack, references).values()
    ]
    template = render_document(
        TEMPLATES / "batch_stack.yaml.jinja",
        stack=stack,
        subnets=dict(stack.subnets),
        reservation_zone=stack.capacity_reservation.zone if stack.capacity_reservation else None,
        instance_role=role,
        secrets=_list_secrets(job),
        launch_template=resources[0],
        environment=resources[1] | {"ReplaceComputeEnvironment": False},
        policy=resources[2] if has_policy else None,
        queue=resources[-1],
        creates_placement_group=group is not None and stack.placement_group is None,
        log_group=target.log_group if target.log_group != DEFAULT_LOG_GROUP else None,
    )
    return {**_render_requests(job, target, stack, names), TEMPLATE_FILE: template}


def _find_placement_group(job: JobSpec, stack: BatchStack) -> str | None:
    """Return the placement group, by default a new one for EFA; a reservation has its own."""
    needs_group = job.uses_efa and stack.capacity_reservation is None
    return stack.placement_group or (stack.name if needs_group else None)


def _name_policy(target: BatchSettings, stack: BatchStack) -> str:
    """Return the scheduling policy ARN, with the account from a role in the settings."""
    accounts = [_ACCOUNT.search(role) for role in (target.execution_role, target.job_role) if role]
    if not accounts or accounts[0] is None:
        return UNKNOWN_POLICY
    return f"arn:aws:batch:{target.region}:{accounts[0][1]}:scheduling-policy/{stack.name}"


def _render_requests(
    job: JobSpec, target: BatchSettings, stack: BatchStack, names: dict[str, Any]
) -> Documents:
    """Return the requests; `names` are part names, or references between resources."""
    machine = require_machine(job)
    reservation = stack.capacity_reservation
    requests = render_document(
        TEMPLATES / "stack_requests.yaml.jinja",
        stack=stack,
        names=names,
        machine=machine,
        spot=job.spot,
        efa_interfaces=machine.efa_interfaces if job.uses_efa else 0,
        image_type=find_batch_devices(machine.vendor).image_type,
        max_vcpus=stack.max_vcpus or job.max_nodes * job.jobs * (machine.vcpus or 1),
        mounts=_list_lustre_mounts(job, target.region),
        reservation=reservation.id if reservation else None,
        security_groups=list(stack.security_groups),
        tags=_build_stack_tags(job),
    )
    data = requests["create-launch-template.json"]["LaunchTemplateData"]
    data["UserData"] = base64.b64encode(data["UserData"].encode()).decode()
    return requests


def _list_lustre_mounts(job: JobSpec, region: str) -> list[tuple[str, str]]:
    """Return the address and folder for each file system that a machine mounts."""
    sources = [(item.name, LustreSource.parse(item)) for item in job.volumes if item.kind == "fsx"]
    return [
        (f"{source.find_host_name(region)}@tcp:/{source.mount_name}", f"{HOST_MOUNTS}/{name}")
        for name, source in sources
    ]


def _build_stack_tags(job: JobSpec) -> dict[str, str]:
    machine = require_machine(job)
    price = machine.usd_per_hour
    values = {
        "instance": machine.name,
        "usd-per-machine-hour": None if price is None else f"{price:.6g}",
        "price-date": machine.price_date,
        "machine-vcpus": None if machine.vcpus is None else str(machine.vcpus),
    }
    tags = {f"{TAG_PREFIX}{key}": value for key, value in values.items() if value is not None}
    return dict(job.labels) | tags


def _list_secrets(job: JobSpec) -> dict[str, list[str]]:
    """Return IAM action -> secret ARNs that it reads."""
    arns = {
        action: sorted(
            {arn for arn in job.secrets.values() if re.match(rf"arn:aws[-a-z]*:{service}:", arn)}
        )
        for service, action in SECRET_ACTIONS.items()
    }
    return {action: values for action, values in arns.items() if values}


def _capitalize_keys(value: Any) -> Any:
    """Return a request with CloudFormation property names; tags stay unchanged."""
    if isinstance(value, list):
        return [_capitalize_keys(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key[0].upper() + key[1:]: item if key == "tags" else _capitalize_keys(item)
        for key, item in value.items()
    }
