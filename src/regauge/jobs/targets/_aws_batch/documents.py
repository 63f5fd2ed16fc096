"""A job's RegisterJobDefinition and SubmitJob requests, its tags, and the processes they start."""

from __future__ import annotations

import json
import re
from typing import Any

from regauge.jobs.targets import JobSpec, LeaderAddress, NodeCommand
from regauge.jobs.targets._aws_batch.container import TEMPLATES, build_container
from regauge.jobs.targets._aws_batch.settings import BatchSettings
from regauge.jobs.targets._templates import render_document
from regauge.system.errors import RESTART_CODES, SettingsError

DEFINITION_FILE, SUBMIT_FILE = "register-job-definition.json", "submit-job.json"
MAX_ARRAY = 10_000
"""Maximum array size, in jobs."""
MAX_DEFINITION_BYTES = 24 * 1024
"""Maximum RegisterJobDefinition size; the request contains the run file.

https://docs.aws.amazon.com/batch/latest/userguide/service_limits.html
"""
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
    """Return the RegisterJobDefinition request.

    Raises SettingsError for invalid combinations, and for a run file that is too large.
    """
    if job.limit_seconds is not None and job.limit_seconds < MIN_SECONDS:
        problem = f"launch.hours = {job.hours:g} is below the minimum of AWS Batch, 60 s"
        raise SettingsError(problem, "set launch.hours to 0.02 or more")
    definition = render_document(
        TEMPLATES / "job_definition.yaml.jinja",
        job=job,
        target=target,
        container=build_container(job, target),
        host_loss=HOST_LOSS,
        restart_codes=RESTART_CODES,
        tags=build_tags(job),
    )
    size, limit = len(json.dumps(definition)), MAX_DEFINITION_BYTES
    if size > limit:
        num_bytes = len(json.dumps(job.run_file_text))
        problem = f"the job definition has {size:,} bytes, {num_bytes:,} of them the run file"
        remedy = "move data of the run file into files, or remove comments"
        raise SettingsError(f"{problem}, and AWS Batch allows {limit:,}", remedy)
    return definition


def build_submit_request(job: JobSpec, target: BatchSettings, queue: str) -> dict[str, Any]:
    """Return the SubmitJob request, which names the job definition without a revision."""
    _check_array(job)
    template = TEMPLATES / "submit_job.yaml.jinja"
    return render_document(template, job=job, target=target, queue=queue, tags=build_tags(job))


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
        "price-date": job.price_date,
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


def build_node_commands(
    definition: dict[str, Any], request: dict[str, Any], leader: LeaderAddress
) -> list[NodeCommand]:
    """Return the process that Batch starts for each node or array job, with its variables.

    The rendezvous port comes from `leader`; the main node lacks a variable with its own address.
    Sources: https://docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html and
    https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html.
    """
    nodes = definition.get("nodeProperties")
    size = request.get("arrayProperties", {}).get("size", 1)
    if nodes is None:
        container = definition["containerProperties"]
        array = {"AWS_BATCH_JOB_ARRAY_SIZE": str(size)} if size > 1 else {}
        variables = [
            array | ({"AWS_BATCH_JOB_ARRAY_INDEX": str(index)} if array else {})
            for index in range(size)
        ]
    else:
        container = nodes["nodeRangeProperties"][0]["container"]
        variables = [
            build_node_variables(index, nodes, leader.host) | {"MASTER_PORT": str(leader.port)}
            for index in range(nodes["numNodes"])
        ]
    document = {item["name"]: item["value"] for item in container["environment"]}
    attempt = {"AWS_BATCH_JOB_ID": leader.run_id, "AWS_BATCH_JOB_ATTEMPT": "1"}
    command = tuple(container["command"])
    return [
        NodeCommand(index, command, document | attempt | node)
        for index, node in enumerate(variables)
    ]


def build_node_variables(index: int, nodes: dict[str, Any], main_address: str) -> dict[str, str]:
    """Return a node's variables in a multi-node parallel job.

    Only child nodes get the main node's address.
    """
    main = nodes["mainNode"]
    variables = {
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": str(main),
        "AWS_BATCH_JOB_NODE_INDEX": str(index),
        "AWS_BATCH_JOB_NUM_NODES": str(nodes["numNodes"]),
    }
    if index != main:
        variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = main_address
    return variables
