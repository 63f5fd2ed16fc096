"""Checks for AWS Batch requests. They read only the documents, whoever built them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from regauge.jobs.lints import Check, Lint, build_lint
from regauge.jobs.lints_efa import DEVICE
from regauge.jobs.lints_job import is_mounted
from regauge.jobs.targets import JobSpec, LaunchPlan, is_local_folder

MAX_ATTEMPTS, MAX_RULES, MAX_SHARES = 10, 5, 500
"""Batch limits: attempts and rules in a retry strategy, and shares in a scheduling policy."""
Content = dict[str, Any]
_SECRET_ARN = re.compile(
    r"arn:aws[-a-z]*:(secretsmanager:[-a-z0-9]+:\d{12}:secret:|ssm:[-a-z0-9]+:\d{12}:parameter/)\S+"
)


def check_requests(plan: LaunchPlan) -> Iterator[Lint]:
    """Report problems with Batch requests; yields nothing for other targets."""
    contents = {document.name: document.content for document in plan.documents}
    definition = contents.get("register-job-definition.json")
    if definition is None:
        return
    queue = contents.get("create-job-queue.json")
    yield from _check_retries(plan.job, definition.get("retryStrategy"))
    policy = contents.get("create-scheduling-policy.json")
    if queue and contents["submit-job.json"]["jobQueue"] == queue["jobQueueName"]:
        yield from _check_share(contents["submit-job.json"].get("shareIdentifier"), policy)
    yield from _check_machines(plan.job, definition, contents)
    if queue is not None and not queue.get("jobStateTimeLimitActions"):
        yield build_lint("batch-time-limits")
    for container in _list_containers(definition):
        yield from _check_secrets(container)
    yield from _check_output(plan.job)


def _check_retries(job: JobSpec, strategy: Content | None) -> Iterator[Lint]:
    """Report strategies that retry forever, or that the API refuses."""
    if job.max_attempts > MAX_ATTEMPTS:
        yield build_lint("batch-attempts", count=job.max_attempts, maximum=MAX_ATTEMPTS)
    if strategy is None:
        return
    rules = strategy.get("evaluateOnExit", [])
    if not rules or not _is_final_exit(rules[-1]):
        yield build_lint("batch-final-exit")
    if len(rules) > MAX_RULES:
        yield build_lint("batch-retry-rules", count=len(rules), maximum=MAX_RULES)


def _is_final_exit(rule: dict[str, str]) -> bool:
    conditions = {value for key, value in rule.items() if key != "action"}
    return rule["action"].upper() == "EXIT" and conditions == {"*"}


def _check_share(share: str | None, policy: Content | None) -> Iterator[Lint]:
    """Report a share identifier that does not match the stack queue's scheduling policy."""
    if policy is None:
        if share is not None:
            problem = f"share_identifier = '{share}' needs a queue with a fair-share policy"
            remedy = "remove it, or set stack.fair_share"
            yield build_lint("batch-share", problem=problem, remedy=remedy)
        return
    names = [item["shareIdentifier"] for item in policy["fairsharePolicy"]["shareDistribution"]]
    if share is None:
        problem = "the queue has a fair-share policy, and share_identifier is not set"
        remedy = "set share_identifier in [[launch.target]]"
        yield build_lint("batch-share", problem=problem, remedy=remedy)
    elif names and not any(_matches_share(share, name) for name in names):
        yield build_lint("batch-share-weight", share=share)
    if len(names) > MAX_SHARES:
        yield build_lint("batch-share-count", count=len(names), maximum=MAX_SHARES)


def _matches_share(share: str, name: str) -> bool:
    return share.startswith(name[:-1]) if name.endswith("*") else share == name


def _check_machines(job: JobSpec, definition: Content, contents: Content) -> Iterator[Lint]:
    resources = contents.get("create-compute-environment.json", {}).get("computeResources", {})
    is_multi_node = definition.get("type") == "multinode"
    if is_multi_node and (job.spot or resources.get("type") == "SPOT"):
        yield build_lint("batch-multi-node-spot")
    containers = list(_list_containers(definition))
    types = sorted({item["instanceType"] for item in containers if "instanceType" in item})
    offers = resources.get("instanceTypes", [])
    if is_multi_node and max(len(types), len(offers)) > 1:
        names = ", ".join(types if len(types) > 1 else offers)
        yield build_lint("batch-mixed-instances", types=names)
    name = job.machine.name if job.machine else None
    if name and offers and not {name, name.partition(".")[0], "optimal"} & set(offers):
        yield build_lint("batch-instance-missing", machine=name, types=", ".join(offers))
    template = contents.get("create-launch-template.json", {}).get("LaunchTemplateData", {})
    has_reservation = "CapacityReservationSpecification" in template
    if "placementGroup" in resources and has_reservation:
        yield build_lint("batch-placement-reservation")
    has_placement = "placementGroup" in resources or has_reservation
    if resources and not has_placement and any(map(_has_efa, containers)):
        yield build_lint("batch-efa-placement")
    metadata = contents.get("batch-stack.json", {}).get("Metadata", {})
    yield from _check_zones(metadata.get("AvailabilityZones", {}), is_multi_node=is_multi_node)


def _has_efa(container: Content) -> bool:
    devices = container.get("linuxParameters", {}).get("devices", [])
    return any(device["hostPath"].startswith(DEVICE) for device in devices)


def _check_zones(zones: Content, *, is_multi_node: bool) -> Iterator[Lint]:
    """Report subnets outside the reservation's zone, and nodes in several zones."""
    reserved, subnets = zones.get("CapacityReservation"), zones.get("Subnets", {})
    for subnet, zone in subnets.items():
        if reserved is not None and zone != reserved:
            yield build_lint("batch-reservation-zone", reserved=reserved, subnet=subnet, zone=zone)
    if is_multi_node and reserved is None and len(set(subnets.values())) > 1:
        yield build_lint("batch-zones")


def _check_secrets(container: Content) -> Iterator[Lint]:
    for secret in container.get("secrets", []):
        if not _SECRET_ARN.fullmatch(secret["valueFrom"]):
            yield build_lint("batch-secret-value", name=secret["name"])
    if container.get("secrets") and "executionRoleArn" not in container:
        yield build_lint("batch-secret-role")


def _check_output(job: JobSpec) -> Iterator[Lint]:
    """Report an output folder that would be lost with the container."""
    mounts = [volume.mount for volume in job.volumes if not volume.read_only]
    if is_local_folder(job.output) and not is_mounted(job.output, mounts):
        is_shared = job.max_nodes > 1 or job.jobs > 1 or bool(job.stage)
        yield build_lint("batch-output-volume", output=job.output)._replace(is_error=is_shared)


def _list_containers(definition: Content) -> Iterator[Content]:
    if "containerProperties" in definition:
        yield definition["containerProperties"]
    for node_range in definition.get("nodeProperties", {}).get("nodeRangeProperties", []):
        yield node_range["container"]


CHECKS: tuple[Check, ...] = (check_requests,)
