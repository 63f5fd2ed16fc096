"""A job's RegisterJobDefinition and SubmitJob requests, and its tags."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from regauge.jobs.targets._aws_batch.container import TEMPLATES, build_container
from regauge.jobs.targets._templates import render_document
from regauge.system.errors import RESTART_CODES, SettingsError

if TYPE_CHECKING:
    from regauge.jobs.targets import JobSpec
    from regauge.jobs.targets._aws_batch.settings import BatchSettings

DEFINITION_FILE, SUBMIT_FILE = "register-job-definition.json", "submit-job.json"
MAX_ARRAY = 10_000
"""Maximum array size, in jobs."""
MIN_SECONDS = 60
"""Minimum time limit for an attempt."""
MAX_TAGS = 50
HOST_LOSS = "Host EC2*"
"""Status reason pattern after losing a machine.

https://docs.aws.amazon.com/batch/latest/userguide/spot_interruptions.html
"""
TAG_PREFIX = "regauge-"
_TAG = re.compile(r"[-\w +=.:/@]*")
_TAG_KEY_LENGTH, _TAG_VALUE_LENGTH = 128, 256


def build_job_definition(job: JobSpec, target: BatchSettings) -> dict[str, Any]:
    """Return the RegisterJobDefinition request; raises SettingsError for invalid combinations."""
    if job.limit_seconds is not None and job.limit_seconds < MIN_SECONDS:
        problem = f"launch.hours = {job.hours:g} is below the minimum of AWS Batch, 60 s"
        raise SettingsError(problem, "set launch.hours to 0.02 or more")
    definition: dict[str, Any] = render_document(
        TEMPLATES / "job_definition.yaml.jinja",
        job=job,
        target=target,
        container=build_container(job, target),
        host_loss=HOST_LOSS,
        restart_codes=RESTART_CODES,
        tags=build_tags(job),
    )
    return definition


def build_submit_request(job: JobSpec, target: BatchSettings, queue: str) -> dict[str, Any]:
    """Return the SubmitJob request, which names the job definition without a revision."""
    _check_array(job)
    template = TEMPLATES / "submit_job.yaml.jinja"
    request: dict[str, Any] = render_document(
        template, job=job, target=target, queue=queue, tags=build_tags(job)
    )
    return request


def _check_array(job: JobSpec) -> None:
    if job.jobs > 1 and job.max_nodes > 1:
        problem = f"launch.jobs = {job.jobs} with {job.max_nodes} nodes"
        raise SettingsError(
            f"{problem}: an array job of AWS Batch has one node per job",
            "set execution.nodes.count to 1",
        )
    if job.jobs > MAX_ARRAY:
        problem = f"launch.jobs = {job.jobs} is above the maximum of AWS Batch, {MAX_ARRAY}"
        raise SettingsError(problem, "set launch.jobs to fewer")


def build_tags(job: JobSpec) -> dict[str, str]:
    """Return a job's tags: labels, machines, and the price at submission.

    Raises SettingsError for labels that are not valid AWS tags.
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
            problem = f"launch.labels: '{key}' with value '{value}' is not an AWS tag"
            raise SettingsError(problem, "write letters, digits, spaces and + - = . _ : / @")
    if len(tags) > MAX_TAGS:
        problem = f"launch.labels has {len(job.labels)} entries, and AWS allows {MAX_TAGS} tags"
        raise SettingsError(problem, "remove some")
    return tags
