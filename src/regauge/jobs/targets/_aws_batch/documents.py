"""The requests RegisterJobDefinition and SubmitJob of a job, and its tags."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from regauge.jobs.targets._aws_batch.container import ContainerOptions, build_container
from regauge.system.errors import RESTART_CODES, SettingsError

if TYPE_CHECKING:
    from regauge.jobs.targets import JobSpec

DEFINITION_FILE, SUBMIT_FILE = "register-job-definition.json", "submit-job.json"
MIN_ARRAY, MAX_ARRAY = 2, 10_000
"""Sizes of an array job."""
MIN_SECONDS = 60
"""Minimum time limit of an attempt."""
MAX_TAGS = 50
HOST_LOSS = "Host EC2*"
"""Pattern of the status reason after the loss of a machine.

https://docs.aws.amazon.com/batch/latest/userguide/spot_interruptions.html
"""
TAG_PREFIX = "regauge-"
_TAG = re.compile(r"[-\w +=.:/@]*")
_TAG_KEY_LENGTH, _TAG_VALUE_LENGTH = 128, 256


def build_job_definition(
    job: JobSpec, options: ContainerOptions, scheduling_priority: int | None
) -> dict[str, Any]:
    """Return the request RegisterJobDefinition; raises SettingsError for invalid combinations.

    Format: https://docs.aws.amazon.com/batch/latest/APIReference/API_RegisterJobDefinition.html.
    """
    container = build_container(job, options)
    definition: dict[str, Any] = {"jobDefinitionName": job.name}
    if job.max_nodes > 1:
        definition["type"] = "multinode"
        definition["nodeProperties"] = {
            "numNodes": job.max_nodes,
            "mainNode": 0,
            "nodeRangeProperties": [{"targetNodes": "0:", "container": container}],
        }
    else:
        definition["type"] = "container"
        definition["containerProperties"] = container
    if scheduling_priority is not None:
        definition["schedulingPriority"] = scheduling_priority
    definition["retryStrategy"] = build_retry_strategy(job.max_attempts)
    if job.limit_seconds is not None:
        if job.limit_seconds < MIN_SECONDS:
            problem = f"launch.hours = {job.hours:g} is below the minimum of AWS Batch, 60 s"
            raise SettingsError(problem, "set launch.hours to 0.02 or more")
        definition["timeout"] = {"attemptDurationSeconds": job.limit_seconds}
    definition["propagateTags"] = True
    definition["platformCapabilities"] = ["EC2"]
    definition["tags"] = build_tags(job)
    return definition


def build_retry_strategy(max_attempts: int) -> dict[str, Any]:
    """Return the retry strategy: another attempt after host loss and after RESTART_CODES.

    Batch uses the first matching rule of at most five, and retries a job if no rule matches.
    https://docs.aws.amazon.com/batch/latest/APIReference/API_EvaluateOnExit.html
    """
    rules = [{"action": "RETRY", "onStatusReason": HOST_LOSS}]
    rules += [{"action": "RETRY", "onExitCode": str(code)} for code in RESTART_CODES]
    rules.append({"action": "EXIT", "onReason": "*"})
    return {"attempts": max_attempts, "evaluateOnExit": rules}


def build_submit_request(job: JobSpec, queue: str, share_identifier: str | None) -> dict[str, Any]:
    """Return the request SubmitJob, which names the job definition without its revision.

    It also names the job that must succeed before; the submission replaces the name by its id.

    Format: https://docs.aws.amazon.com/batch/latest/APIReference/API_SubmitJob.html.
    """
    request: dict[str, Any] = {
        "jobName": job.name,
        "jobQueue": queue,
        "jobDefinition": job.name,
    }
    if share_identifier is not None:
        request["shareIdentifier"] = share_identifier
    if job.jobs > 1:
        _check_array(job)
        request["arrayProperties"] = {"size": job.jobs}
    if job.after:
        request["dependsOn"] = [{"jobId": job.after}]
    request["propagateTags"] = True
    request["tags"] = build_tags(job)
    return request


def _check_array(job: JobSpec) -> None:
    if job.max_nodes > 1:
        problem = f"launch.jobs = {job.jobs} with {job.max_nodes} nodes"
        raise SettingsError(
            f"{problem}: an array job of AWS Batch has one node per job",
            "set execution.nodes.count to 1",
        )
    if not MIN_ARRAY <= job.jobs <= MAX_ARRAY:
        problem = f"launch.jobs = {job.jobs} is above the maximum of AWS Batch, {MAX_ARRAY}"
        raise SettingsError(problem, "set launch.jobs to fewer")


def build_tags(job: JobSpec) -> dict[str, str]:
    """Return the tags of a job: its labels, its machines, and its price at submission.

    Raises SettingsError for labels that are not tags of AWS.
    """
    tags = dict(job.labels)
    machine = job.machine
    facts = {
        "verb": job.verb,
        "stage": job.stage,
        "machines": str(job.max_nodes * job.jobs),
        "processes": str(job.processes_per_node or 1),
        "instance": machine.name if machine else None,
        "usd-per-hour": None if job.usd_per_hour is None else f"{job.usd_per_hour:.6g}",
        "price-date": machine.price_date if machine else None,
        "output": job.output if _TAG.fullmatch(job.output) else None,
    }
    tags |= {f"{TAG_PREFIX}{key}": value for key, value in facts.items() if value}
    for key, value in tags.items():
        is_reserved = key.lower().startswith("aws:")
        has_length = 0 < len(key) <= _TAG_KEY_LENGTH and len(value) <= _TAG_VALUE_LENGTH
        if is_reserved or not has_length or not _TAG.fullmatch(f"{key}{value}"):
            problem = f"launch.labels: '{key}' with value '{value}' is not a tag of AWS"
            raise SettingsError(problem, "write letters, digits, spaces and + - = . _ : / @")
    if len(tags) > MAX_TAGS:
        problem = f"launch.labels has {len(job.labels)} entries, and AWS allows {MAX_TAGS} tags"
        raise SettingsError(problem, "remove some")
    return tags
