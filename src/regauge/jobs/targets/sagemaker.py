"""Amazon SageMaker: a server as a real-time endpoint with autoscaling.

The endpoint is named after the job. A handle is `sagemaker://<region>/<endpoint>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

from pydantic import Field

from regauge.jobs.targets import (
    ContainerLauncher,
    Document,
    Handle,
    JobEvent,
    JobFailure,
    JobSpec,
    JobState,
    JobStatus,
    LaunchPlan,
    Leftover,
    LogRequest,
    NodeStatus,
)
from regauge.jobs.targets._aws_batch.jobs import read_stream
from regauge.jobs.targets._aws_batch.settings import Region, Role
from regauge.jobs.targets._aws_batch.status import FINAL_STATUSES
from regauge.jobs.targets._job_end import build_ended_error, check_ended
from regauge.jobs.targets._sagemaker import (
    CONFIG,
    ENDPOINT,
    POLICY,
    TARGET,
    build_requests,
    identify_target,
)
from regauge.jobs.targets._times import format_time
from regauge.machines.aws_client import AwsClient
from regauge.system.errors import SettingsError, TransientError
from regauge.system.log import logger
from regauge.system.timing import SERVICE_POLL_SECONDS, wait_for

REGION_KEY = "launch.target.region"
START_SECONDS = 3600.0
"""Time for an endpoint to serve, which autoscaling waits for."""
SERVICES = {TARGET: "application-autoscaling", POLICY: "application-autoscaling"}
"""Request -> service; by default `sagemaker`."""
VERSIONED = {"model": "ModelName", "endpoint_config": "EndpointConfigName"}
"""Versioned objects -> the key with their name."""
MISSING = "ValidationException"
"""Error code for an object that does not exist."""
STATES: dict[str, JobState] = {
    "Creating": "starting",
    "InService": "running",
    "Updating": "running",
    "SystemUpdating": "running",
    "RollingBack": "running",
    "Deleting": "cancelled",
    "Failed": "failed",
    "OutOfService": "failed",
    "UpdateRollbackFailed": "failed",
}
"""EndpointStatus -> state; an endpoint serves while it is updated."""


class SageMaker(ContainerLauncher):
    """Real-time endpoints on Amazon SageMaker."""

    supports_servers: ClassVar[bool] = True
    supports_arrays: ClassVar[bool] = True  # the replicas of a server

    region: Region = "us-east-1"
    """AWS region."""
    role: Role | None = None
    """The endpoint's execution role, which reads the image and the model."""
    max_machines: int | None = Field(default=None, ge=1)
    """Maximum machine count; by default it does not change."""
    requests_per_second: float | None = Field(default=None, gt=0)
    """Requests per second for each machine, as measured by `regauge benchmark --serve`; autoscaling
    keeps them at this rate."""

    def plan(self, job: JobSpec) -> LaunchPlan:
        if job.server is None:
            problem = f"target 'sagemaker' runs servers, not '{job.verb}'"
            raise SettingsError(problem, "launch 'serve', or choose another target")
        if self.role is None:
            raise SettingsError("target 'sagemaker' needs a role", "set launch.target.role")
        if job.secrets:
            problem = "launch.secrets is set, and SageMaker has no references to secrets"
            raise SettingsError(problem, "remove it; IAM decides who may call the endpoint")
        limits = None
        if self.max_machines is not None and self.max_machines != job.jobs:
            if self.requests_per_second is None:
                problem = "launch.target.max_machines needs the load of a machine"
                raise SettingsError(problem, "set launch.target.requests_per_second")
            limits = (self.max_machines, self.requests_per_second)
        requests = build_requests(job, job.server, self.role, limits)
        wait = ("wait", "endpoint-in-service", "--endpoint-name", job.name)
        commands = [self._build_command(name) for name in requests]
        if limits is not None:
            commands.insert(3, ("aws", "sagemaker", *wait, "--region", self.region))
        return LaunchPlan(
            job,
            documents=tuple(Document(f"{name}.json", body) for name, body in requests.items()),
            commands=tuple(commands),
            notes=("The server is an endpoint. The price is that of EC2; SageMaker costs more.",),
            restart_policy="A machine that does not answer /ping is replaced, without limit.",
            used=frozenset({"machine", "jobs", "image", "environment", "labels"}),
        )

    def _build_command(self, name: str) -> tuple[str, ...]:
        service = SERVICES.get(name, "sagemaker")
        return (
            *("aws", service, name, "--region", self.region),
            *("--cli-input-json", f"file://{name}.json"),
        )

    def submit(self, plan: LaunchPlan) -> Handle:
        """Create the endpoint, or move an existing one to the new model while the old one serves.

        A refused endpoint leaves neither model nor configuration behind.
        """
        requests = {item.name.removesuffix(".json"): item.content for item in plan.documents}
        name, version = plan.job.name, requests[CONFIG]["EndpointConfigName"]
        created: list[str] = []
        with AwsClient("sagemaker", self.region, REGION_KEY) as client:
            try:
                for kind, key in VERSIONED.items():
                    if not client.has_object(f"describe_{kind}", MISSING, **{key: version}):
                        request = requests[f"create-{kind.replace('_', '-')}"]
                        client.call(f"create_{kind}", **request)
                        created.append(kind)
                if not client.has_object("describe_endpoint", MISSING, EndpointName=name):
                    client.call("create_endpoint", **requests[ENDPOINT])
                else:
                    self._stop_scaling(name, self.region)
                    client.call("update_endpoint", EndpointName=name, EndpointConfigName=version)
            except BaseException:
                for kind in reversed(created):
                    client.call(f"delete_{kind}", **{VERSIONED[kind]: version})
                raise
            if TARGET in requests:
                self._start_scaling(client, name, requests)
        return Handle(self.kind, self.region, name)

    def _start_scaling(self, client: AwsClient, name: str, requests: dict[str, Any]) -> None:
        """Register the autoscaling as soon as the endpoint serves."""
        logger.info("waiting until the endpoint serves, to register its autoscaling")
        describe = partial(client.call, "describe_endpoint", EndpointName=name)
        is_settled = wait_for(
            lambda: not describe()["EndpointStatus"].endswith("ing"),
            START_SECONDS,
            poll_seconds=SERVICE_POLL_SECONDS,
        )
        if not is_settled or describe()["EndpointStatus"] != "InService":
            problem = f"the endpoint {name} does not serve, so it has no autoscaling"
            raise TransientError(problem, "read 'regauge job status', then launch it again")
        with AwsClient(SERVICES[TARGET], self.region, REGION_KEY) as scaling:
            scaling.call("register_scalable_target", **requests[TARGET])
            scaling.call("put_scaling_policy", **requests[POLICY])

    def _stop_scaling(self, name: str, region: str) -> None:
        """Deregister the autoscaling if it exists; it would refuse another machine type."""
        with AwsClient(SERVICES[TARGET], region, REGION_KEY) as scaling:
            key = identify_target(name)
            scaling.has_object("deregister_scalable_target", "ObjectNotFoundException", **key)

    def find_status(self, handle: Handle) -> JobStatus:
        with AwsClient("sagemaker", handle.context, REGION_KEY) as client:
            endpoint = _describe(client, handle)
        if endpoint is None:
            return JobStatus(handle, "cancelled")
        status = endpoint["EndpointStatus"]
        state = STATES.get(status, "unknown")
        reason = str(endpoint.get("FailureReason", "" if status == "InService" else status))
        count = sum(item["CurrentInstanceCount"] for item in endpoint.get("ProductionVariants", []))
        return JobStatus(
            handle,
            state,
            reason=reason,
            attempt=1,
            nodes=tuple(NodeStatus(index, state) for index in range(count)),
            failure=JobFailure("unknown", message=reason) if state == "failed" else None,
            submitted_at=format_time(endpoint["CreationTime"]),
        )

    def list_events(self, handle: Handle) -> list[JobEvent]:
        with AwsClient("sagemaker", handle.context, REGION_KEY) as client:
            endpoint = _describe(client, handle)
        if endpoint is None:
            return []
        message = endpoint.get("FailureReason", endpoint["EndpointStatus"])
        times = {"created": endpoint["CreationTime"], message: endpoint["LastModifiedTime"]}
        return [JobEvent(format_time(time), self.kind, text) for text, time in times.items()]

    def read_log(self, handle: Handle, request: LogRequest) -> Iterator[str]:
        """Yield the newest machine's log; `rank` counts the machines, newest first."""
        group = f"/aws/sagemaker/Endpoints/{handle.job_id}"

        def describe() -> dict[str, Any]:
            return {"status": FINAL_STATUSES[0] if self.find_status(handle).is_final else ""}

        with AwsClient("logs", handle.context, REGION_KEY) as logs:
            order = {"orderBy": "LastEventTime", "descending": True}
            answer = logs.call("describe_log_streams", logGroupName=group, **order)
            names = [item["logStreamName"] for item in answer["logStreams"]]
            index = request.rank or 0
            if index >= len(names):
                problem = f"{handle} has {len(names)} logs"
                raise SettingsError(problem, "read its state with 'regauge job status'")
            follow = describe if request.follow else None
            yield from read_stream(logs, group, names[index], describe=follow)

    def cancel(self, handle: Handle) -> None:
        """Delete the endpoint, which ends its costs; the model and configuration stay."""
        with AwsClient("sagemaker", handle.context, REGION_KEY) as client:
            if _describe(client, handle) is None:
                raise build_ended_error(handle, "cancelled")
            self._stop_scaling(handle.job_id, handle.context)
            client.call("delete_endpoint", EndpointName=handle.job_id)

    def clean_up(self, handle: Handle) -> list[Leftover]:
        """Delete all versions' configurations and models; return the log group."""
        check_ended(self.find_status(handle))
        with AwsClient("sagemaker", handle.context, REGION_KEY) as client:
            if client.has_object("describe_endpoint", MISSING, EndpointName=handle.job_id):
                client.call("delete_endpoint", EndpointName=handle.job_id)
            for version in _list_versions(client, handle.job_id):
                for kind, key in reversed(VERSIONED.items()):
                    client.call(f"delete_{kind}", **{key: version})
        group = f"/aws/sagemaker/Endpoints/{handle.job_id}"
        command = f"aws logs delete-log-group --region {handle.context} --log-group-name {group}"
        return [Leftover(group, "it stores the logs, and storage costs money", command)]


def _describe(client: AwsClient, handle: Handle) -> dict[str, Any] | None:
    """Return an endpoint; None for a deleted one.

    Raises SettingsError for an unknown one, which lacks a configuration, too.
    """
    name = handle.job_id
    endpoint = client.find_object("describe_endpoint", MISSING, EndpointName=name)
    if endpoint is None and not _list_versions(client, name):
        problem = f"SageMaker in {handle.context} has no endpoint {name}"
        raise SettingsError(problem, "correct the handle")
    return endpoint


def _list_versions(client: AwsClient, endpoint: str) -> list[str]:
    """Return an endpoint's configuration names: its name with a digest."""
    answer = client.call("list_endpoint_configs", NameContains=endpoint, MaxResults=100)
    names = [str(item["EndpointConfigName"]) for item in answer["EndpointConfigs"]]
    return [name for name in names if re.fullmatch(rf"{endpoint}-[0-9a-f]{{10}}", name)]
