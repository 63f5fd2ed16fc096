"""Checks for AWS Batch requests. They read only the documents, whoever built them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from regauge.jobs.lints import Check, Lint
from regauge.jobs.lints_efa import DEVICE
from regauge.jobs.lints_job import is_mounted
from regauge.jobs.targets import is_local_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.jobs.targets import JobSpec, LaunchPlan

MAX_ATTEMPTS, MAX_RULES, MAX_SHARES = 10, 5, 500
"""Batch limits: attempts and rules in a retry strategy, and shares in a scheduling policy."""
REFERENCE = "https://docs.aws.amazon.com/batch/latest/APIReference/"
GUIDE = "https://docs.aws.amazon.com/batch/latest/userguide/"
EC2_GUIDE = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/"
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
        problem = "the queue has no jobStateTimeLimitActions, so a job may stay RUNNABLE forever"
        source = "https://github.com/Netflix/metaflow/issues/347"
        yield Lint("batch-time-limits", problem, "add an action for each reason", source)
    for container in _list_containers(definition):
        yield from _check_secrets(container)
    yield from _check_output(plan.job)


def _check_retries(job: JobSpec, strategy: Content | None) -> Iterator[Lint]:
    """Report strategies that retry forever, or that the API refuses."""
    if job.max_attempts > MAX_ATTEMPTS:
        problem = f"launch.max_attempts = {job.max_attempts} is more than {MAX_ATTEMPTS}"
        remedy, source = f"set it to {MAX_ATTEMPTS} or less", f"{REFERENCE}API_RetryStrategy.html"
        yield Lint("batch-attempts", problem, remedy, source)
    if strategy is None:
        return
    rules = strategy.get("evaluateOnExit", [])
    source = f"{REFERENCE}API_EvaluateOnExit.html"
    if not rules or not _is_final_exit(rules[-1]):
        problem = "the last retry rule is not EXIT for every reason, so Batch retries all failures"
        remedy = 'end evaluateOnExit with {"action": "EXIT", "onReason": "*"}'
        yield Lint("batch-final-exit", problem, remedy, source)
    if len(rules) > MAX_RULES:
        problem = f"the retry strategy has {len(rules)} rules, more than {MAX_RULES}"
        yield Lint("batch-retry-rules", problem, "merge or remove rules", source)


def _is_final_exit(rule: dict[str, str]) -> bool:
    conditions = {value for key, value in rule.items() if key != "action"}
    return rule["action"].upper() == "EXIT" and conditions == {"*"}


def _check_share(share: str | None, policy: Content | None) -> Iterator[Lint]:
    """Report a share identifier that does not match the stack queue's scheduling policy."""
    source = f"{REFERENCE}API_SubmitJob.html"
    if policy is None and share is not None:
        problem = f"share_identifier = '{share}', and the queue has no fair-share policy"
        yield Lint("batch-share", problem, "remove it, or set stack.fair_share", source)
    if policy is None:
        return
    names = [item["shareIdentifier"] for item in policy["fairsharePolicy"]["shareDistribution"]]
    if share is None:
        problem = "the queue has a fair-share policy, and the job has no share identifier"
        yield Lint("batch-share", problem, "set share_identifier in [[launch.target]]", source)
    elif names and not any(_matches_share(share, name) for name in names):
        problem = f"the share '{share}' has no weight in stack.fair_share, so its factor is 1"
        remedy, source = (
            "add it to stack.fair_share.weights",
            f"{REFERENCE}API_FairsharePolicy.html",
        )
        yield Lint("batch-share-weight", problem, remedy, source, is_error=False)
    if len(names) > MAX_SHARES:
        problem = f"stack.fair_share.weights has {len(names)} shares, more than {MAX_SHARES}"
        remedy, source = "use identifiers that end with *", f"{REFERENCE}API_FairsharePolicy.html"
        yield Lint("batch-share-count", problem, remedy, source)


def _matches_share(share: str, name: str) -> bool:
    return share.startswith(name[:-1]) if name.endswith("*") else share == name


def _check_machines(job: JobSpec, definition: Content, contents: Content) -> Iterator[Lint]:
    resources = contents.get("create-compute-environment.json", {}).get("computeResources", {})
    is_multi_node = definition.get("type") == "multinode"
    if is_multi_node and (job.spot or resources.get("type") == "SPOT"):
        problem = "multi-node parallel jobs of AWS Batch cannot run on Spot machines"
        remedy = "set launch.spot = false, or execution.nodes.count = 1"
        yield Lint("batch-multi-node-spot", problem, remedy, f"{GUIDE}mnp-ce.html")
    containers = list(_list_containers(definition))
    types = sorted({item["instanceType"] for item in containers if "instanceType" in item})
    offers = resources.get("instanceTypes", [])
    if is_multi_node and max(len(types), len(offers)) > 1:
        names = ", ".join(types if len(types) > 1 else offers)
        problem = f"a multi-node parallel job has one machine type, not {names}"
        source = f"{REFERENCE}API_ContainerProperties.html"
        yield Lint("batch-mixed-instances", problem, "keep one machine type", source)
    name = job.machine.name if job.machine else None
    if name and offers and not {name, name.partition(".")[0], "optimal"} & set(offers):
        problem = f"the stack has no {name}, only {', '.join(offers)}"
        remedy = "add it to stack.instance_types, or set launch.instance"
        yield Lint("batch-instance-missing", problem, remedy, f"{GUIDE}mnp-ce.html")
    template = contents.get("create-launch-template.json", {}).get("LaunchTemplateData", {})
    has_reservation = "CapacityReservationSpecification" in template
    if "placementGroup" in resources and has_reservation:
        problem = "stack.placement_group and stack.capacity_reservation are both set"
        remedy = "remove placement_group; a reservation in a placement group places its machines"
        yield Lint("batch-placement-reservation", problem, remedy, f"{EC2_GUIDE}cr-cpg.html")
    has_placement = "placementGroup" in resources or has_reservation
    if resources and not has_placement and any(map(_has_efa, containers)):
        problem = "machines with EFA are outside a cluster placement group"
        remedy = "set stack.placement_group"
        yield Lint("batch-efa-placement", problem, remedy, f"{GUIDE}efa.html")
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
            problem = f"the reservation is in {reserved}, and {subnet} is in {zone}"
            remedy = f"name only subnets in {reserved} in stack.subnets"
            source = f"{EC2_GUIDE}capacity-reservations-launch.html"
            yield Lint("batch-reservation-zone", problem, remedy, source)
    if is_multi_node and reserved is None and len(set(subnets.values())) > 1:
        problem = "a multi-node job has subnets in several zones, but EFA works only within one"
        remedy = "keep the subnets of one zone in stack.subnets"
        yield Lint("batch-zones", problem, remedy, f"{GUIDE}mnp-ce.html", is_error=False)


def _check_secrets(container: Content) -> Iterator[Lint]:
    source = f"{GUIDE}specifying-sensitive-data.html"
    for secret in container.get("secrets", []):
        if not _SECRET_ARN.fullmatch(secret["valueFrom"]):
            problem = f"launch.secrets.{secret['name']} is not a secret ARN"
            remedy = "set it to the ARN of a Secrets Manager secret or an SSM parameter"
            yield Lint("batch-secret-value", problem, remedy, source)
    if container.get("secrets") and "executionRoleArn" not in container:
        problem = "the job has secrets and no execution role that may read them"
        remedy = "set execution_role in [[launch.target]]"
        yield Lint("batch-secret-role", problem, remedy, source)


def _check_output(job: JobSpec) -> Iterator[Lint]:
    """Report an output folder that would be lost with the container."""
    mounts = [volume.mount for volume in job.volumes if not volume.read_only]
    if is_local_folder(job.output) and not is_mounted(job.output, mounts):
        problem = (
            f"output.folder = '{job.output}' is not on a volume, and is lost with its container"
        )
        remedy, source = "set it to a folder below a mount of launch.volumes", "efs-volumes.html"
        is_shared = job.max_nodes > 1 or job.jobs > 1 or bool(job.stage)
        yield Lint("batch-output-volume", problem, remedy, f"{GUIDE}{source}", is_error=is_shared)


def _list_containers(definition: Content) -> Iterator[Content]:
    if "containerProperties" in definition:
        yield definition["containerProperties"]
    for node_range in definition.get("nodeProperties", {}).get("nodeRangeProperties", []):
        yield node_range["container"]


CHECKS: tuple[Check, ...] = (check_requests,)
