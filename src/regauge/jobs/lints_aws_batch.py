"""Checks of the requests to AWS Batch. They read the documents alone, whoever built them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from regauge.jobs.lints import Check, Lint
from regauge.jobs.lints_efa import DEVICE
from regauge.jobs.lints_job import is_mounted
from regauge.jobs.targets import is_local_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.jobs.targets import LaunchPlan

DEFINITION, SUBMIT = "register-job-definition.json", "submit-job.json"
ENVIRONMENT, POLICY = "create-compute-environment.json", "create-scheduling-policy.json"
QUEUE, LAUNCH_TEMPLATE = "create-job-queue.json", "create-launch-template.json"
TEMPLATE = "batch-stack.json"
MAX_RULES = 5
"""Maximum number of rules of a retry strategy."""
MAX_SHARES = 500
"""Maximum number of shares of a scheduling policy."""
REFERENCE = "https://docs.aws.amazon.com/batch/latest/APIReference/"
GUIDE = "https://docs.aws.amazon.com/batch/latest/userguide/"
MAX_ATTEMPTS = 10
EC2_GUIDE = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/"
_SECRET_ARN = re.compile(
    r"arn:aws[-a-z]*:(secretsmanager:[-a-z0-9]+:\d{12}:secret:|ssm:[-a-z0-9]+:\d{12}:parameter/)\S+"
)


def _find_documents(plan: LaunchPlan) -> dict[str, Any]:
    """Return the documents of a plan by name; empty for a plan of another target."""
    contents = {document.name: document.content for document in plan.documents}
    return contents if DEFINITION in contents else {}


def _list_containers(contents: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the container of each range of nodes."""
    definition = contents.get(DEFINITION, {})
    if "containerProperties" in definition:
        yield definition["containerProperties"]
    for node_range in definition.get("nodeProperties", {}).get("nodeRangeProperties", []):
        yield node_range["container"]


def _is_multi_node(contents: dict[str, Any]) -> bool:
    return bool(contents.get(DEFINITION, {}).get("type") == "multinode")


def _find_resources(contents: dict[str, Any]) -> dict[str, Any]:
    """Return `computeResources` of the stack; empty for a plan without a stack."""
    resources: dict[str, Any] = contents.get(ENVIRONMENT, {}).get("computeResources", {})
    return resources


def check_attempts(plan: LaunchPlan) -> Iterator[Lint]:
    """Report more attempts than AWS Batch permits."""
    if _find_documents(plan) and plan.job.max_attempts > MAX_ATTEMPTS:
        yield Lint(
            "batch-attempts",
            f"launch.max_attempts = {plan.job.max_attempts} is more than {MAX_ATTEMPTS}",
            f"set it to {MAX_ATTEMPTS} or less",
            "https://docs.aws.amazon.com/batch/latest/APIReference/API_RetryStrategy.html",
        )


def check_retry_rules(plan: LaunchPlan) -> Iterator[Lint]:
    """Report retry strategies that retry without end, or that the API refuses."""
    contents = _find_documents(plan)
    strategy = contents.get(DEFINITION, {}).get("retryStrategy")
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
    conditions = {key: value for key, value in rule.items() if key != "action"}
    return rule["action"].upper() == "EXIT" and set(conditions.values()) == {"*"}


def check_share(plan: LaunchPlan) -> Iterator[Lint]:
    """Report share identifiers that do not match the scheduling policy of the stack's queue."""
    contents = _find_documents(plan)
    if QUEUE not in contents or contents[SUBMIT]["jobQueue"] != contents[QUEUE]["jobQueueName"]:
        return
    source = f"{REFERENCE}API_SubmitJob.html"
    share, policy = contents[SUBMIT].get("shareIdentifier"), contents.get(POLICY)
    if policy is None:
        if share is not None:
            problem = f"share_identifier = '{share}', and the queue has no fair-share policy"
            remedy = "remove it, or set stack.fair_share"
            yield Lint("batch-share", problem, remedy, source)
        return
    if share is None:
        problem = "the queue has a fair-share policy, and the job has no share identifier"
        yield Lint("batch-share", problem, "set share_identifier in [[launch.target]]", source)
        return
    names = [item["shareIdentifier"] for item in policy["fairsharePolicy"]["shareDistribution"]]
    if names and not any(_matches_share(share, name) for name in names):
        problem = f"the share '{share}' has no weight in stack.fair_share, so its factor is 1"
        remedy = "add it to stack.fair_share.weights"
        source = f"{REFERENCE}API_FairsharePolicy.html"
        yield Lint("batch-share-weight", problem, remedy, source, is_error=False)


def _matches_share(share: str, name: str) -> bool:
    return share.startswith(name[:-1]) if name.endswith("*") else share == name


def check_share_count(plan: LaunchPlan) -> Iterator[Lint]:
    """Report a scheduling policy with more shares than AWS Batch allows."""
    policy = _find_documents(plan).get(POLICY, {}).get("fairsharePolicy", {})
    count = len(policy.get("shareDistribution", []))
    if count > MAX_SHARES:
        problem = f"stack.fair_share.weights has {count} shares, more than {MAX_SHARES}"
        remedy = "use identifiers that end with *"
        yield Lint("batch-share-count", problem, remedy, f"{REFERENCE}API_FairsharePolicy.html")


def check_spot(plan: LaunchPlan) -> Iterator[Lint]:
    """Report a multi-node parallel job on Spot machines."""
    contents = _find_documents(plan)
    is_spot = _find_resources(contents).get("type") == "SPOT" or plan.job.spot
    if _is_multi_node(contents) and is_spot:
        problem = "multi-node parallel jobs of AWS Batch cannot run on Spot machines"
        remedy = "set launch.spot = false, or execution.nodes.count = 1"
        yield Lint("batch-multi-node-spot", problem, remedy, f"{GUIDE}mnp-ce.html")


def check_instance_types(plan: LaunchPlan) -> Iterator[Lint]:
    """Report several machine types of a multi-node parallel job, and a stack without its type."""
    contents = _find_documents(plan)
    containers = list(_list_containers(contents))
    types = sorted({item["instanceType"] for item in containers if "instanceType" in item})
    stack_types = _find_resources(contents).get("instanceTypes", [])
    if _is_multi_node(contents) and max(len(types), len(stack_types)) > 1:
        names = ", ".join(types if len(types) > 1 else stack_types)
        problem = f"a multi-node parallel job has one machine type, not {names}"
        source = f"{REFERENCE}API_ContainerProperties.html"
        yield Lint("batch-mixed-instances", problem, "keep one machine type", source)
    machine = plan.job.machine
    if stack_types and machine is not None and contents and not _offers(stack_types, machine.name):
        problem = f"the stack has no {machine.name}, only {', '.join(stack_types)}"
        remedy = "add it to stack.instance_types, or set launch.instance"
        yield Lint("batch-instance-missing", problem, remedy, f"{GUIDE}mnp-ce.html")


def _offers(stack_types: list[str], name: str) -> bool:
    """Return whether the types of a compute environment, or their families, include a type."""
    return bool({name, name.partition(".")[0], "optimal"} & set(stack_types))


def check_placement(plan: LaunchPlan) -> Iterator[Lint]:
    """Report a placement group with a reservation, and EFA machines without placement."""
    contents = _find_documents(plan)
    resources = _find_resources(contents)
    template = contents.get(LAUNCH_TEMPLATE, {}).get("LaunchTemplateData", {})
    has_reservation = "CapacityReservationSpecification" in template
    if "placementGroup" in resources and has_reservation:
        problem = "stack.placement_group and stack.capacity_reservation are both set"
        remedy = "remove placement_group; a reservation in a placement group places its machines"
        source = f"{EC2_GUIDE}cr-cpg.html"
        yield Lint("batch-placement-reservation", problem, remedy, source)
    has_efa = any(_count_efa_devices(item) for item in _list_containers(contents))
    if resources and has_efa and "placementGroup" not in resources and not has_reservation:
        problem = "machines with EFA are in no cluster placement group"
        remedy = "set stack.placement_group"
        yield Lint("batch-efa-placement", problem, remedy, f"{GUIDE}efa.html")


def check_zones(plan: LaunchPlan) -> Iterator[Lint]:
    """Report subnets outside of the reservation's zone, and nodes in several zones."""
    contents = _find_documents(plan)
    zones = contents.get(TEMPLATE, {}).get("Metadata", {}).get("AvailabilityZones", {})
    reserved, subnets = zones.get("CapacityReservation"), zones.get("Subnets", {})
    for subnet, zone in subnets.items():
        if reserved is not None and zone != reserved:
            problem = f"the reservation is in {reserved}, and {subnet} is in {zone}"
            remedy = f"name only subnets in {reserved} in stack.subnets"
            source = f"{EC2_GUIDE}capacity-reservations-launch.html"
            yield Lint("batch-reservation-zone", problem, remedy, source)
    if _is_multi_node(contents) and reserved is None and len(set(subnets.values())) > 1:
        problem = "the subnets of a multi-node job are in several zones, and EFA crosses no zone"
        remedy = "keep the subnets of one zone in stack.subnets"
        yield Lint("batch-zones", problem, remedy, f"{GUIDE}mnp-ce.html", is_error=False)


def _count_efa_devices(container: dict[str, Any]) -> int:
    devices = container.get("linuxParameters", {}).get("devices", [])
    return sum(device["hostPath"].startswith(DEVICE) for device in devices)


def check_time_limits(plan: LaunchPlan) -> Iterator[Lint]:
    """Report a queue in which a job that cannot start waits without end."""
    queue = _find_documents(plan).get(QUEUE)
    if queue is not None and not queue.get("jobStateTimeLimitActions"):
        problem = "the queue has no jobStateTimeLimitActions, so a job may stay RUNNABLE forever"
        remedy = "add an action for each reason"
        source = "https://github.com/Netflix/metaflow/issues/347"
        yield Lint("batch-time-limits", problem, remedy, source)


def check_secrets(plan: LaunchPlan) -> Iterator[Lint]:
    """Report secrets that are values instead of ARNs, and secrets without an execution role."""
    source = f"{GUIDE}specifying-sensitive-data.html"
    for container in _list_containers(_find_documents(plan)):
        for secret in container.get("secrets", []):
            if not _SECRET_ARN.fullmatch(secret["valueFrom"]):
                problem = f"launch.secrets.{secret['name']} is not an ARN of a secret"
                remedy = "set it to the ARN of a Secrets Manager secret or an SSM parameter"
                yield Lint("batch-secret-value", problem, remedy, source)
        if container.get("secrets") and "executionRoleArn" not in container:
            problem = "the job has secrets and no execution role that may read them"
            remedy = "set execution_role in [[launch.target]]"
            yield Lint("batch-secret-role", problem, remedy, source)


def check_output(plan: LaunchPlan) -> Iterator[Lint]:
    """Report an output folder that is lost with its container."""
    if not _find_documents(plan):
        return
    output = plan.job.output
    mounts = [volume.mount for volume in plan.job.volumes if not volume.read_only]
    if is_local_folder(output) and not is_mounted(output, mounts):
        is_shared = plan.job.max_nodes > 1 or plan.job.jobs > 1 or bool(plan.job.stage)
        problem = f"output.folder = '{output}' is on no volume, and is lost with its container"
        remedy = "set it to a folder below a mount of launch.volumes"
        source = f"{GUIDE}efs-volumes.html"
        yield Lint("batch-output-volume", problem, remedy, source, is_error=is_shared)


CHECKS: tuple[Check, ...] = (
    check_attempts,
    check_retry_rules,
    check_share,
    check_share_count,
    check_spot,
    check_instance_types,
    check_placement,
    check_zones,
    check_time_limits,
    check_secrets,
    check_output,
)
