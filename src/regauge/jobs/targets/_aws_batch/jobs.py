"""Jobs in an AWS Batch region: submit, describe, cancel, clean up, and read logs."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from regauge.jobs.targets import Handle, Leftover
from regauge.jobs.targets._aws_batch.documents import TAG_PREFIX
from regauge.jobs.targets._aws_batch.settings import DEFAULT_LOG_GROUP
from regauge.jobs.targets._aws_batch.status import (
    CANCEL_REASON,
    FINAL_STATUSES,
    QUEUED_STATUSES,
    Detail,
    find_state,
    is_cancelled,
)
from regauge.jobs.targets._job_end import build_active_error, build_ended_error
from regauge.machines.aws_client import AwsClient
from regauge.system.errors import RegaugeError, SettingsError
from regauge.system.log import logger

_ECR_IMAGE = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[-a-z0-9]+)\.amazonaws\.com/"
    r"(?P<repository>[^:@]+)(?P<separator>[:@])(?P<version>.+)"
)
PRICE_KEYS = ("usd-per-machine-hour", "machine-vcpus")
"""Compute environment tags used to compute the cost."""
PAUSE_SECONDS = 2.0
REGION_KEY = "launch.target.region"
MAX_DESCRIBED = 100
"""Maximum number of jobs per DescribeJobs request."""


class BatchRegion:
    def __init__(self, region: str) -> None:
        self.region = region
        self._batch = AwsClient("batch", region, REGION_KEY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._batch.__exit__(*exception)

    def submit(self, definition: Detail, request: Detail, previous: str | None = None) -> str:
        """Register a job definition and submit a job; return the job identifier.

        `previous` identifies the job to wait for. If the job is refused, or the command is
        interrupted, the definition is deregistered.
        """
        if previous is not None:
            request = request | {"dependsOn": [{"jobId": previous}]}
        self.check_queue(definition, request)
        for container in list_containers(definition):
            check_image(container["image"])
        response = self._batch.call("register_job_definition", **definition)
        arn = str(response["jobDefinitionArn"])
        try:
            response = self._batch.call("submit_job", **request | {"jobDefinition": arn})
        except BaseException as error:
            self._deregister_after(error, arn)
            raise
        return str(response["jobId"])

    def withdraw(self, job_id: str) -> None:
        """Stop a job and deregister its definition; log a warning if Batch refuses it."""
        try:
            definition = self.describe(job_id)["jobDefinition"]
            self._batch.call("terminate_job", jobId=job_id, reason=CANCEL_REASON)
            self._batch.call("deregister_job_definition", jobDefinition=definition)
        except RegaugeError as error:
            command = f"aws batch terminate-job --region {self.region} --job-id {job_id}"
            logger.warning("%s; stop the job: %s --reason cancelled", error.problem, command)

    def _deregister_after(self, error: BaseException, arn: str) -> None:
        """Deregister a definition; if that fails, add the command for it to the error."""
        try:
            self._batch.call("deregister_job_definition", jobDefinition=arn)
        except RegaugeError:
            command = _build_command(self.region, "deregister-job-definition", arn)
            if isinstance(error, RegaugeError):
                text = f"{error.problem}; the job definition {arn} still exists"
                raise type(error)(text, f"remove it: {' '.join(command)}") from None
            text = "the job definition %s still exists; remove it: %s"
            logger.warning(text, arn, " ".join(command))

    def check_queue(self, definition: Detail, request: Detail) -> None:
        """Raise SettingsError if the queue cannot run a job; log a warning without time limits."""
        queue = self._find_queue(str(request["jobQueue"]))
        name = queue["jobQueueName"]
        if queue.get("state") != "ENABLED":
            problem = f"the job queue '{name}' is {queue.get('state')}"
            raise SettingsError(problem, "enable it, or set launch.target.queue to another one")
        has_policy, has_share = "schedulingPolicyArn" in queue, "shareIdentifier" in request
        if has_policy and not has_share:
            problem = f"the job queue '{name}' has a fair-share policy"
            raise SettingsError(problem, "set share_identifier in [[launch.target]]")
        if has_share and not has_policy:
            problem = f"the job queue '{name}' has no fair-share policy"
            raise SettingsError(problem, "remove share_identifier from [[launch.target]]")
        if definition["type"] == "multinode":
            self._check_no_spot(queue)
        if not queue.get("jobStateTimeLimitActions"):
            logger.warning("the job queue '%s' has no jobStateTimeLimitActions", name)

    def _find_queue(self, name: str) -> Detail:
        queues = self._batch.call("describe_job_queues", jobQueues=[name])["jobQueues"]
        if not queues:
            problem = f"there is no job queue '{name}' in {self.region}"
            raise SettingsError(problem, "correct launch.target.queue, or create the stack first")
        return dict(queues[0])

    def _check_no_spot(self, queue: Detail) -> None:
        for environment in self._list_environments(queue):
            resources = environment.get("computeResources", {})
            if resources.get("type") == "SPOT":
                name = environment["computeEnvironmentName"]
                problem = f"the compute environment '{name}' uses Spot machines"
                raise SettingsError(
                    f"{problem}, which a multi-node parallel job cannot run on",
                    "set launch.target.queue to a queue of on-demand machines",
                )

    def _list_environments(self, queue: Detail) -> list[Detail]:
        order = queue.get("computeEnvironmentOrder", [])
        names = [item["computeEnvironment"] for item in order]
        if not names:
            return []
        response = self._batch.call("describe_compute_environments", computeEnvironments=names)
        return list(response["computeEnvironments"])

    def describe(self, job_id: str) -> Detail:
        """Return a job's DescribeJobs entry; raises SettingsError for an unknown job."""
        jobs = self._batch.call("describe_jobs", jobs=[job_id])["jobs"]
        if not jobs:
            problem = f"AWS Batch in {self.region} has no job {job_id}"
            raise SettingsError(
                problem, "correct the handle; Batch forgets a job 7 days after its end"
            )
        return dict(jobs[0])

    def describe_chain(self, job_id: str) -> list[Detail]:
        """Return a job after the earlier stages in its pipeline, first stage first."""
        chain = [self.describe(job_id)]
        while previous := _find_previous(chain[0]):
            chain.insert(0, self.describe(previous))
        return chain

    def describe_children(self, detail: Detail) -> list[Detail]:
        """Return a multi-node parallel job's nodes, or an array's jobs, by index."""
        names = list_child_names(detail)
        jobs: dict[str, Detail] = {}
        for start in range(0, len(names), MAX_DESCRIBED):
            chunk = names[start : start + MAX_DESCRIBED]
            response = self._batch.call("describe_jobs", jobs=chunk)
            jobs |= {str(job["jobId"]): job for job in response["jobs"]}
        return [jobs.get(name, {"jobId": name, "status": ""}) for name in names]

    def cancel(self, handle: Handle) -> None:
        """Cancel a queued job or terminate a running one; raises SettingsError if it has ended.

        An array is terminated, because it stays PENDING while its jobs run.
        """
        detail = self.describe(handle.job_id)
        if detail["status"] in FINAL_STATUSES:
            raise build_ended_error(handle, find_state(detail))
        if is_cancelled(detail):
            problem = f"{handle} is being cancelled already"
            raise SettingsError(problem, f"wait for its end: regauge job wait {handle}")
        is_queued = detail["status"] in QUEUED_STATUSES and "arrayProperties" not in detail
        operation = "cancel_job" if is_queued else "terminate_job"
        self._batch.call(operation, jobId=handle.job_id, reason=CANCEL_REASON)

    def clean_up(self, handle: Handle) -> list[Leftover]:
        """Deregister a job's definition; return the existing queue and machines.

        Raises SettingsError for a job that has not ended.
        """
        detail = self.describe(handle.job_id)
        if detail["status"] not in FINAL_STATUSES:
            raise build_active_error(handle, find_state(detail))
        leftovers: list[Leftover] = []
        if any(key.startswith(TAG_PREFIX) for key in detail.get("tags", {})):
            self._batch.call("deregister_job_definition", jobDefinition=detail["jobDefinition"])
        else:
            arn = str(detail["jobDefinition"])
            command = _build_command(self.region, "deregister-job-definition", arn)
            reason = "the job lacks Regauge tags, so Regauge may not have registered it"
            leftovers.append(Leftover(arn, reason, " ".join(command)))
        return [*leftovers, *self._audit_queue(str(detail["jobQueue"])), self._audit_logs(detail)]

    def _audit_queue(self, name: str) -> Iterator[Leftover]:
        """Yield a job's queue and compute environments, with machine costs."""
        queues = self._batch.call("describe_job_queues", jobQueues=[name])["jobQueues"]
        for queue in queues:
            remedy = f"aws batch delete-job-queue --region {self.region} --job-queue "
            reason = f"it is {queue.get('state')} and costs nothing; disable it before its deletion"
            yield Leftover(str(queue["jobQueueArn"]), reason, remedy + queue["jobQueueName"])
            for environment in self._list_environments(queue):
                yield self._audit_environment(environment)

    def _audit_logs(self, detail: Detail) -> Leftover:
        """Return a job's log group, which keeps the log after the end."""
        options = list_containers(detail)[0].get("logConfiguration", {}).get("options", {})
        group = options.get("awslogs-group", DEFAULT_LOG_GROUP)
        command = f"aws logs delete-log-group --region {self.region} --log-group-name {group}"
        return Leftover(group, "it stores the logs of jobs, and storage costs money", command)

    def _audit_environment(self, environment: Detail) -> Leftover:
        name = environment["computeEnvironmentName"]
        return Leftover(
            str(environment["computeEnvironmentArn"]),
            describe_machines(environment),
            f"aws cloudformation delete-stack --region {self.region} --stack-name {name}, "
            f"or aws batch delete-compute-environment --region {self.region} "
            f"--compute-environment {name}",
        )


def list_containers(document: Detail) -> list[Detail]:
    """Return the containers in a job definition or job, one per node range."""
    ranges = document.get("nodeProperties", {}).get("nodeRangeProperties", [])
    single = document.get("containerProperties") or document.get("container", {})
    return [node_range["container"] for node_range in ranges] or [single]


def check_image(image: str) -> None:
    """Raise SettingsError if an Amazon ECR registry does not contain an image.

    Other registries are not checked, nor is a registry that cannot be read.
    """
    match = _ECR_IMAGE.fullmatch(image)
    if match is None:
        return
    key = "imageDigest" if match["separator"] == "@" else "imageTag"
    request = {"registryId": match["account"], "repositoryName": match["repository"]}
    try:
        with AwsClient("ecr", match["region"], "the region in launch.image") as ecr:
            is_stored = ecr.has_object(
                "describe_images",
                "NotFoundException",
                imageIds=[{key: match["version"]}],
                **request,
            )
    except RegaugeError as error:
        logger.warning("the image was not checked: %s", error.problem)
        return
    if not is_stored:
        problem = f"the image {image} is not in its registry"
        raise SettingsError(problem, "push it, or correct launch.image")


def _find_previous(detail: Detail) -> str | None:
    """Return the job that a pipeline stage waits for; None for the first stage."""
    if f"{TAG_PREFIX}stage" not in detail.get("tags", {}):
        return None
    return next((str(item["jobId"]) for item in detail.get("dependsOn", [])), None)


def list_child_names(detail: Detail) -> list[str]:
    """Return the identifiers for a job's nodes, or for an array's jobs.

    Source: https://docs.aws.amazon.com/batch/latest/userguide/multi-node-parallel-jobs.html.
    """
    num_nodes = detail.get("nodeProperties", {}).get("numNodes", 0)
    size = detail.get("arrayProperties", {}).get("size", 0)
    job_id = detail["jobId"]
    return [f"{job_id}#{index}" for index in range(num_nodes)] or [
        f"{job_id}:{index}" for index in range(size)
    ]


def describe_machines(environment: Detail) -> str:
    """Return a compute environment's running vCPUs, with their cost if known."""
    resources, tags = environment.get("computeResources", {}), environment.get("tags", {})
    desired, minimum = resources.get("desiredvCpus", 0), resources.get("minvCpus", 0)
    text = f"{desired} vCPUs run now, {minimum} keep running without a job"
    price, machine_vcpus = (tags.get(f"{TAG_PREFIX}{key}") for key in PRICE_KEYS)
    if desired and price and machine_vcpus:
        usd_per_hour = math.ceil(desired / int(machine_vcpus)) * float(price)
        text += f"; about {usd_per_hour:.2f} USD per hour"
        text += f" (price of {tags.get(f'{TAG_PREFIX}price-date', 'an unknown date')})"
    return text


def _build_command(region: str, operation: str, arn: str) -> tuple[str, ...]:
    return ("aws", "batch", operation, "--region", region, "--job-definition", arn)


def select_child(detail: dict[str, Any], rank: int | None) -> str:
    """Return the node that runs a rank, or the array job with this index.

    By default this is the main node, or job 0 in the array. Raises SettingsError for other ranks.
    """
    names = list_child_names(detail)
    if not names:
        return str(detail["jobId"])
    num_processes = int(detail.get("tags", {}).get(f"{TAG_PREFIX}processes", 1))
    is_array = "arrayProperties" in detail
    index = 0 if rank is None else rank // (1 if is_array else num_processes)
    if not 0 <= index < len(names):
        highest = len(names) * (1 if is_array else num_processes) - 1
        problem = f"the job {detail['jobId']} has no rank {rank}"
        raise SettingsError(problem, f"set --rank to 0 to {highest}")
    return names[index]


def find_log_stream(detail: dict[str, Any], attempt: int | None) -> tuple[str, str]:
    """Return an attempt's log group and log stream, by default for the last attempt.

    Raises SettingsError without a log stream.
    """
    container = detail.get("container", {})
    options = container.get("logConfiguration", {}).get("options", {})
    streams = [
        item.get("container", {}).get("logStreamName") for item in detail.get("attempts", [])
    ]
    last = container.get("logStreamName")
    if last is not None and last not in streams:
        streams.append(last)
    number = len(streams) if attempt is None else attempt
    stream = streams[number - 1] if 1 <= number <= len(streams) else None
    if stream is None:
        problem = f"{detail['jobId']} has no log of attempt {number}"
        if not any(streams):
            problem = f"{detail['jobId']} has no log: its status is {detail.get('status')}"
        raise SettingsError(problem, "read its state with 'regauge job status'")
    return str(options.get("awslogs-group", DEFAULT_LOG_GROUP)), str(stream)


def read_stream(
    logs: AwsClient, group: str, stream: str, *, describe: Callable[[], dict[str, Any]] | None
) -> Iterator[str]:
    """Yield a log stream's lines; if `describe` is set, until the job it reads ends."""
    token: str | None = None
    has_ended = describe is None
    while True:
        request: dict[str, Any] = {"logGroupName": group, "logStreamName": stream}
        if token is not None:
            request["nextToken"] = token
        response = logs.call("get_log_events", **request, startFromHead=True)
        for event in response["events"]:
            yield str(event["message"]).rstrip("\n")
        is_last_page = response["nextForwardToken"] == token or not response["events"]
        token = response["nextForwardToken"]
        if not is_last_page:
            continue
        if has_ended:
            return
        has_ended = describe is not None and describe()["status"] in FINAL_STATUSES
        if not has_ended:
            time.sleep(PAUSE_SECONDS)
