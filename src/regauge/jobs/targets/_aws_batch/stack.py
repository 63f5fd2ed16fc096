"""The requests that create the machines and the queue of a stack, and their tags.

`template` writes the same resources as a CloudFormation template.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.jobs.targets._aws_batch.container import (
    HOST_MOUNTS,
    find_batch_devices,
    require_machine,
)
from regauge.jobs.targets._aws_batch.documents import TAG_PREFIX
from regauge.jobs.targets._aws_batch.settings import BatchStack
from regauge.jobs.targets._lustre import LustreSource
from regauge.system.units import SECONDS_PER_MINUTE

if TYPE_CHECKING:
    from regauge.jobs.targets import JobSpec, Machine

LAUNCH_TEMPLATE_FILE = "create-launch-template.json"
ENVIRONMENT_FILE = "create-compute-environment.json"
POLICY_FILE = "create-scheduling-policy.json"
QUEUE_FILE = "create-job-queue.json"
CAPACITY_REASON = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
MISCONFIGURATION_REASONS = (
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
)
"""Reasons that `jobStateTimeLimitActions` supports; waiting does not help against the last two.

https://docs.aws.amazon.com/batch/latest/userguide/job_stuck_in_runnable_time_limit_actions.html
"""
MIN_PENDING_SECONDS = 600
STOP_SECONDS = 120
"""Seconds from the stop signal of a container to its end, for the checkpoint of a run."""
DISK_GB = 200
UNKNOWN_POLICY = "<ARN that create-scheduling-policy returns>"


@dataclass(frozen=True)
class StackPlan:
    """A stack, and the job that its defaults are taken from."""

    stack: BatchStack
    job: JobSpec
    region: str
    account: str | None
    """Account number; None if no setting contains it."""

    @property
    def machine(self) -> Machine:
        """The machine type of the job."""
        return require_machine(self.job)

    @property
    def max_vcpus(self) -> int:
        """The maximum number of vCPUs of the compute environment."""
        default = self.job.max_nodes * self.job.jobs * (self.machine.vcpus or 1)
        return self.stack.max_vcpus or default

    @property
    def instance_role(self) -> str:
        """The name of the role of the machines and of its instance profile."""
        return f"{self.stack.name}-instance"

    @property
    def placement_group(self) -> str | None:
        """The placement group; a reservation has its own placement."""
        if self.stack.placement_group is not None:
            return self.stack.placement_group
        return self.stack.name if self.creates_placement_group else None

    @property
    def creates_placement_group(self) -> bool:
        """Whether the stack contains a cluster placement group, as EFA needs one."""
        has_placement = self.stack.placement_group or self.stack.capacity_reservation
        return self.job.uses_efa and not has_placement

    @property
    def tags(self) -> dict[str, str]:
        """The tags of the stack: labels, the machine type, and its price with a date."""
        machine = self.machine
        price = machine.usd_per_hour
        facts = {
            "instance": machine.name,
            "usd-per-machine-hour": None if price is None else f"{price:.6g}",
            "price-date": machine.price_date,
            "machine-vcpus": None if machine.vcpus is None else str(machine.vcpus),
        }
        tags = {f"{TAG_PREFIX}{key}": value for key, value in facts.items() if value is not None}
        return dict(self.job.labels) | tags


def build_launch_template(plan: StackPlan) -> dict[str, Any]:
    """Return `LaunchTemplateData`: disk, metadata service, EFA interfaces and user data.

    Format: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RequestLaunchTemplateData.html.
    """
    disk = {"VolumeSize": DISK_GB, "VolumeType": "gp3", "Encrypted": True}
    data: dict[str, Any] = {
        "BlockDeviceMappings": [
            {"DeviceName": "/dev/xvda", "Ebs": {**disk, "DeleteOnTermination": True}}
        ],
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
        "UserData": base64.b64encode(build_user_data(plan).encode()).decode(),
    }
    if plan.job.uses_efa:
        data["NetworkInterfaces"] = [
            _build_interface(card, plan.stack) for card in range(plan.machine.efa_interfaces)
        ]
    if plan.stack.capacity_reservation is not None:
        target = {"CapacityReservationId": plan.stack.capacity_reservation.id}
        data["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
    return data


def _build_interface(card: int, stack: BatchStack) -> dict[str, Any]:
    """Return an EFA interface; the first one is also the interface for other traffic.

    Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html.
    """
    return {
        "NetworkCardIndex": card,
        "DeviceIndex": min(card, 1),
        "InterfaceType": "efa",
        "Groups": list(stack.security_groups),
        "DeleteOnTermination": True,
    }


def build_user_data(plan: StackPlan) -> str:
    """Return the start script of a machine, as the multipart text that Batch requires.

    Source: https://docs.aws.amazon.com/batch/latest/userguide/launch-templates.html.
    """
    lines = [
        "#!/bin/bash",
        f"echo ECS_CONTAINER_STOP_TIMEOUT={STOP_SECONDS}s >> /etc/ecs/ecs.config",
        "echo ECS_ENABLE_SPOT_INSTANCE_DRAINING=true >> /etc/ecs/ecs.config",
    ]
    volumes = [volume for volume in plan.job.volumes if volume.kind == "fsx"]
    if volumes:
        lines.append("dnf install -y lustre-client || amazon-linux-extras install -y lustre")
    for volume in volumes:
        source = LustreSource.parse(volume)
        address = f"{source.find_host_name(plan.region)}@tcp:/{source.mount_name}"
        folder = f"{HOST_MOUNTS}/{volume.name}"
        lines.append(f"mkdir -p {folder}")
        lines.append(f"mount -t lustre -o relatime,flock {address} {folder}")
    script = "\n".join(lines)
    return (
        'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="==REGAUGE=="\n\n'
        '--==REGAUGE==\nContent-Type: text/x-shellscript; charset="us-ascii"\n\n'
        f"{script}\n\n--==REGAUGE==--\n"
    )


def build_compute_environment(plan: StackPlan) -> dict[str, Any]:
    """Return the request CreateComputeEnvironment.

    If the launch template has network interfaces, it contains the security groups.
    Format: https://docs.aws.amazon.com/batch/latest/APIReference/API_CreateComputeEnvironment.html.
    """
    stack, machine = plan.stack, plan.machine
    default = "SPOT_PRICE_CAPACITY_OPTIMIZED" if plan.job.spot else "BEST_FIT_PROGRESSIVE"
    resources: dict[str, Any] = {
        "type": "SPOT" if plan.job.spot else "EC2",
        "allocationStrategy": stack.allocation_strategy or default,
        "minvCpus": stack.min_vcpus,
        "maxvCpus": plan.max_vcpus,
        "instanceTypes": list(stack.instance_types or (machine.name,)),
        "subnets": list(stack.subnets),
    }
    if not plan.job.uses_efa:
        resources["securityGroupIds"] = list(stack.security_groups)
    resources["instanceRole"] = plan.instance_role
    if plan.placement_group is not None:
        resources["placementGroup"] = plan.placement_group
    resources["launchTemplate"] = {"launchTemplateName": stack.name, "version": "$Latest"}
    image = {"imageType": find_batch_devices(machine.vendor).image_type}
    if stack.image_id is not None:
        image["imageIdOverride"] = stack.image_id
    resources["ec2Configuration"] = [image]
    resources["tags"] = plan.tags
    return {
        "computeEnvironmentName": stack.name,
        "type": "MANAGED",
        "state": "ENABLED",
        "computeResources": resources,
        "tags": plan.tags,
    }


def build_scheduling_policy(plan: StackPlan) -> dict[str, Any] | None:
    """Return the request CreateSchedulingPolicy; None for a queue without fair share.

    Format: https://docs.aws.amazon.com/batch/latest/APIReference/API_FairsharePolicy.html.
    """
    fair_share = plan.stack.fair_share
    if fair_share is None:
        return None
    policy: dict[str, Any] = {
        "shareDecaySeconds": fair_share.share_decay_seconds,
        "computeReservation": fair_share.compute_reservation,
        "shareDistribution": [
            {"shareIdentifier": name, "weightFactor": weight}
            for name, weight in sorted(fair_share.weights.items())
        ],
    }
    return {"name": plan.stack.name, "fairsharePolicy": policy, "tags": plan.tags}


def build_job_queue(plan: StackPlan) -> dict[str, Any]:
    """Return the request CreateJobQueue, with time limits for jobs that cannot start.

    Format: https://docs.aws.amazon.com/batch/latest/APIReference/API_CreateJobQueue.html.
    """
    stack = plan.stack
    queue: dict[str, Any] = {"jobQueueName": stack.name, "state": "ENABLED", "priority": 1}
    if stack.fair_share is not None:
        resource = f"scheduling-policy/{stack.name}"
        arn = f"arn:aws:batch:{plan.region}:{plan.account}:{resource}"
        queue["schedulingPolicyArn"] = UNKNOWN_POLICY if plan.account is None else arn
    queue["computeEnvironmentOrder"] = [{"order": 1, "computeEnvironment": stack.name}]
    queue["jobStateTimeLimitActions"] = build_time_limits(stack.pending_minutes)
    queue["tags"] = plan.tags
    return queue


def build_time_limits(pending_minutes: int) -> list[dict[str, Any]]:
    """Return the actions that cancel a job which cannot start, one per reason."""
    seconds = {CAPACITY_REASON: math.ceil(pending_minutes * SECONDS_PER_MINUTE)}
    seconds |= dict.fromkeys(MISCONFIGURATION_REASONS, MIN_PENDING_SECONDS)
    return [
        {"reason": reason, "state": "RUNNABLE", "maxTimeSeconds": limit, "action": "CANCEL"}
        for reason, limit in seconds.items()
    ]
