"""`aws-batch` target settings. This module does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator

from regauge.config import Settings
from regauge.config.validation import require_pattern
from regauge.jobs.targets import ContainerLauncher

AllocationStrategy = Literal[
    "BEST_FIT",
    "BEST_FIT_PROGRESSIVE",
    "SPOT_CAPACITY_OPTIMIZED",
    "SPOT_PRICE_CAPACITY_OPTIMIZED",
]
DEFAULT_LOG_GROUP = "/aws/batch/job"
"""Log group created by Batch itself."""
Region = Annotated[
    str, require_pattern(r"[a-z]{2}(-[a-z]+)+-\d", "an AWS region; write one such as us-east-1")
]
Role = Annotated[
    str,
    require_pattern(
        r"arn:aws[-a-z]*:iam::\d{12}:role/[-\w+=,.@/]+",
        "a role ARN; write one such as arn:aws:iam::123456789012:role/name",
    ),
]
Share = Annotated[
    str, require_pattern(r"[A-Za-z0-9]{1,255}", "a share identifier; write letters and digits")
]
StackName = Annotated[
    str,
    require_pattern(
        r"[A-Za-z0-9][-_A-Za-z0-9]{0,99}", "a stack name; write letters, digits and hyphens"
    ),
]


class FairShare(Settings):
    """A queue's fair-share scheduling policy."""

    share_decay_seconds: int = Field(default=604800, ge=0, le=604800)
    """Seconds for which a share's earlier usage counts."""
    compute_reservation: int = Field(default=0, ge=0, le=99)
    """Percentage of vCPUs reserved for shares without running jobs."""
    weights: Mapping[str, float] = Field(default_factory=dict)
    """Weight factor by share identifier; a share with a lower factor receives more vCPUs."""

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, value: Mapping[str, float]) -> Mapping[str, float]:
        for name, weight in value.items():
            if not re.fullmatch(r"[A-Za-z0-9]{1,254}\*?", name):
                raise ValueError(f"{name!r} is not a share identifier; write letters and digits")
            if not 0.0001 <= weight <= 999.9999:  # noqa: PLR2004 - limits of the service
                raise ValueError(f"the weight {weight:g} of {name!r} is not in 0.0001 to 999.9999")
        return value


class CapacityReservation(Settings):
    """An EC2 machine reservation (On-Demand Capacity Reservation or Capacity Block)."""

    id: str
    """Identifier, such as cr-0123456789abcdef0."""
    zone: str
    """The reservation's Availability Zone, such as us-east-1a."""


class BatchStack(Settings):
    """The machines and the queue for jobs; `launch --dry-run` prints their template."""

    name: StackName = "regauge"
    """Name for the CloudFormation stack, the compute environment and the queue."""
    subnets: Mapping[str, str]
    """Availability Zone by subnet, such as { subnet-0a1b = "us-east-1a" }."""
    security_groups: tuple[str, ...]
    """Machine security groups; EFA needs one that allows all traffic to itself."""
    instance_types: tuple[str, ...] = ()
    """Machine types in the compute environment; by default only `launch.instance`."""
    min_vcpus: int = Field(default=0, ge=0)
    """Minimum vCPUs, which run and cost money even without a job."""
    max_vcpus: int | None = Field(default=None, ge=1)
    """Maximum vCPUs; by default as many as the job needs."""
    allocation_strategy: AllocationStrategy | None = None
    """Selection of machine types; by default SPOT_PRICE_CAPACITY_OPTIMIZED for Spot machines,
    and otherwise BEST_FIT_PROGRESSIVE."""
    placement_group: str | None = None
    """Existing cluster placement group; by default EFA machines get a new one."""
    capacity_reservation: CapacityReservation | None = None
    """Reservation to start the machines in."""
    image_id: str | None = None
    """Machine image (AMI) with an ECS agent and the drivers; by default Amazon's ECS image."""
    pending_minutes: int = Field(default=60, ge=10, le=1440)
    """Minutes after which Batch cancels a job that cannot start."""
    fair_share: FairShare | None = None
    """Queue scheduling policy; by default first in, first out."""

    @field_validator("subnets", "security_groups")
    @classmethod
    def _check_not_empty(
        cls, value: Mapping[str, str] | tuple[str, ...]
    ) -> Mapping[str, str] | tuple[str, ...]:
        if not value:
            raise ValueError("it is empty; name at least one")
        return value


class BatchSettings(ContainerLauncher):
    """Queue, roles and container size for a job."""

    region: Region = "us-east-1"
    """AWS region."""
    queue: str | None = None
    """Job queue name or ARN; by default the `stack` queue."""
    job_role: Role | None = None
    """Role ARN for the containers, for example to read the data."""
    execution_role: Role | None = None
    """Role ARN for starting containers: it reads the image and the secrets."""
    log_group: str = DEFAULT_LOG_GROUP
    """Log group in CloudWatch Logs."""
    share_identifier: Share | None = None
    """The jobs' share in a queue with a fair-share policy."""
    scheduling_priority: int | None = Field(default=None, ge=0, le=9999)
    """Priority among jobs in the same share; higher values are scheduled first."""
    vcpus: int | None = Field(default=None, ge=1)
    """vCPUs per container; by default all of the machine's."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Memory per container in GiB; by default 90 % of the machine's."""
    stack: BatchStack | None = None
    """Machines and queue, if a stack from this run file creates them."""
