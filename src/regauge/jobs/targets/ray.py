"""Ray: a job on a Ray cluster, with one actor per node, or Ray Data for `predict`."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from regauge.config import Tables
from regauge.jobs.targets import (
    COMMON_FIELDS,
    FINAL_STATES,
    Document,
    Handle,
    JobEvent,
    JobFailure,
    JobSpec,
    JobState,
    JobStatus,
    Launcher,
    LaunchPlan,
    LeaderAddress,
    Leftover,
    LogRequest,
    NodeCommand,
    NodeStatus,
)
from regauge.jobs.targets._job_end import cancel_job, check_ended
from regauge.jobs.targets._nodes import build_leader_variables, relocate_command
from regauge.jobs.targets._ray_driver import DriverOptions, read_events, read_lines
from regauge.jobs.targets._secret_files import check_secret_files
from regauge.jobs.targets._times import format_epoch
from regauge.system.errors import PreflightError, SettingsError, TransientError, first_line
from regauge.system.timing import REMOTE_POLL_SECONDS

DRIVER = "regauge.jobs.targets._ray_driver"
DOCUMENT = "job.json"
CANCEL_SECONDS = 90.0
AUTHENTICATION_REMEDY = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the token of the cluster"
INSTALL_COMMAND = "pip install 'regauge[ray]'"
EXECUTOR_KEY = "execution.executor"
STATES: dict[str, JobState] = {
    "PENDING": "pending",
    "RUNNING": "running",
    "STOPPED": "cancelled",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
}
"""Ray status -> job state."""
ACTIVE_STATES: dict[str, JobState] = {"starting": "starting", "restarting": "restarting"}
"""State in the last event of a job that Ray runs -> job state; others are `running`."""


class RayCluster(Launcher):
    """Ray cluster jobs, submitted through the dashboard server."""

    address: str = "127.0.0.1:8265"
    """Host and port for the cluster dashboard, which accepts jobs."""
    working_dir: str | None = None
    """Folder to copy to the nodes; by default they share this machine's folders."""
    packages: tuple[str, ...] = ()
    """Python packages for Ray to install on each node, such as `regauge[ray]==0.1.0`."""
    cpus: float | None = Field(default=None, ge=0)
    """CPUs per node; by default one for each process."""
    gpus: float = Field(default=0, ge=0)
    """Accelerators per node that Ray counts as GPUs."""
    resources: dict[str, float] = {}
    """Other resources per node, by their cluster names, such as `{neuron_cores = 32}`."""
    placement_strategy: Literal["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"] = "STRICT_SPREAD"
    """How job nodes are placed on cluster machines."""
    grace_seconds: float = Field(default=60, gt=0)
    """Time to save a checkpoint after a stop signal; then the command is killed."""

    def plan(self, job: JobSpec) -> LaunchPlan:
        check_secret_files(job)
        # Ray kills the entrypoint after this time, which is 3 s by default.
        wait = {"RAY_JOB_STOP_WAIT_TIME_S": str(round(self.grace_seconds + 15))}
        runtime_env: dict[str, Any] = {"env_vars": {**job.environment, **wait}}
        if self.working_dir is not None:
            runtime_env["working_dir"] = self.working_dir
        if self.packages:
            runtime_env["pip"] = list(self.packages)
        entrypoint = self._build_entrypoint(job)
        metadata = _build_metadata(job)
        content = {
            "submission_id": job.name,
            "entrypoint": shlex.join(entrypoint),
            "runtime_env": runtime_env,
            "metadata": metadata,
        }
        command = ["ray", "job", "submit", "--no-wait", "--address", f"http://{self.address}"]
        command += ["--submission-id", job.name, "--runtime-env-json", json.dumps(runtime_env)]
        command += ["--metadata-json", json.dumps(metadata), "--", *entrypoint]
        restarts = f"the exit codes 75, 76 and 143, at most {job.max_attempts} attempts"
        return LaunchPlan(
            job,
            documents=(Document(DOCUMENT, content),),
            commands=(tuple(command),),
            notes=tuple(self._list_notes(job)),
            restart_policy=f"All nodes start again after the loss of a node and after {restarts}.",
            used=COMMON_FIELDS,
        )

    def _build_entrypoint(self, job: JobSpec) -> list[str]:
        """Return the driver's command line; `exec` lets stop signals reach it.

        For `predict` the driver does not start nodes, because the executor uses the cluster itself.
        """
        command = list(job.command)
        if self.working_dir is not None:
            command = relocate_command(job.command, self.working_dir)
        is_predict = job.verb == "predict"
        options = ["--name", job.name, "--nodes", "0" if is_predict else str(job.max_nodes)]
        if is_predict:
            command += self._select_executor(job)
        else:
            demand = {"CPU": self._count_cpus(job), "GPU": self.gpus, **self.resources}
            demand = {name: count for name, count in demand.items() if count}
            options += ["--resources", json.dumps(demand, separators=(",", ":"))]
            options += ["--strategy", self.placement_strategy]
        options += ["--max-attempts", str(job.max_attempts)]
        options += ["--grace-seconds", f"{self.grace_seconds:g}"]
        options += [] if job.hours is None else ["--hours", f"{job.hours:g}"]
        for name, reference in sorted(job.secrets.items()):
            options += ["--secret", f"{name}={reference}"]
        return ["exec", command[0], "-m", DRIVER, *options, "--", *command]

    def _select_executor(self, job: JobSpec) -> list[str]:
        """Return the override that gives each node a worker, unless the command has one."""
        if any(word.startswith(EXECUTOR_KEY) for word in job.command):
            return []
        resources = "".join(f", {name} = {count:g}" for name, count in self.resources.items())
        table = f'kind = "ray", workers = {job.max_nodes}, cpus = {self._count_cpus(job):g}'
        table += f", gpus = {self.gpus:g}" if self.gpus else ""
        table += f", resources = {{{resources[2:]}}}" if resources else ""
        return [f"{EXECUTOR_KEY}={{{table}}}"]

    def _count_cpus(self, job: JobSpec) -> float:
        default = job.processes if isinstance(job.processes, int) else 1
        return default if self.cpus is None else self.cpus

    def _list_notes(self, job: JobSpec) -> Iterator[str]:
        if job.verb == "predict":
            yield "Ray Data runs the workers, because 'predict' has independent shards."
        else:
            yield f"One actor per node, placed with {self.placement_strategy}."
        if self.working_dir is None:
            yield "The nodes share the folders of this machine, because working_dir is not set."
        yield "The job ends with the head node of the cluster, which runs its driver."

    def list_node_commands(self, plan: LaunchPlan, leader: LeaderAddress) -> list[NodeCommand]:
        entrypoint = shlex.split(plan.documents[0].content["entrypoint"])
        options = DriverOptions.parse(entrypoint[entrypoint.index(DRIVER) + 1 :])
        environment: dict[str, str] = dict(plan.documents[0].content["runtime_env"]["env_vars"])
        if options.nodes:
            environment |= build_leader_variables(str(options.nodes), leader)
        count = max(options.nodes, 1)
        return [NodeCommand(index, options.command, environment) for index in range(count)]

    def submit(self, plan: LaunchPlan) -> Handle:
        document = plan.documents[0].content
        handle = Handle("ray", self.address, document["submission_id"])
        remedy = "correct [[launch.target]] of kind ray"
        try:
            _call(self.address, "submit_job", remedy=remedy, **document)
        except SettingsError as error:
            if "already exists" not in error.problem:
                raise
            problem = f"the cluster at {self.address} has a job '{handle.job_id}' already"
            remedy = f"remove it with: regauge job cleanup {handle}, or set launch.name"
            raise SettingsError(problem, remedy) from None
        return handle

    def find_status(self, handle: Handle) -> JobStatus:
        return build_status(handle, _find_job(handle), _read_log(handle))

    def list_events(self, handle: Handle) -> list[JobEvent]:
        info = _find_job(handle)
        events = [
            JobEvent(event.get("time", ""), "driver", event.get("message", ""))
            for event in read_events(_read_log(handle))
        ]
        if submitted_at := format_epoch(info.start_time):
            events.insert(0, JobEvent(submitted_at, "ray", "submitted"))
        if finished_at := format_epoch(info.end_time):
            events.append(JobEvent(finished_at, "ray", str(info.message)))
        return events

    def read_log(self, handle: Handle, request: LogRequest) -> Iterator[str]:
        node, count = request.rank or 0, 0
        while True:
            state = STATES[_find_job(handle).status]
            is_last = not request.follow or state in FINAL_STATES
            lines = [line for line in read_lines(_read_log(handle)) if line.node == node]
            if request.attempt or not request.follow:
                attempt = request.attempt or max((line.attempt for line in lines), default=1)
                lines = [line for line in lines if line.attempt == attempt]
            yield from (line.text for line in lines[count:])
            count = len(lines)
            if is_last:
                break
            time.sleep(REMOTE_POLL_SECONDS)
        if not count:
            problem = f"node {node} of {handle} has not written any output"
            raise SettingsError(problem, f"read its events with: regauge job events {handle}")

    def cancel(self, handle: Handle) -> None:
        def stop(_: JobStatus) -> None:
            _call(handle.context, "stop_job", handle.job_id)

        cancel_job(handle, self.find_status, stop, CANCEL_SECONDS)

    def clean_up(self, handle: Handle) -> list[Leftover]:
        check_ended(self.find_status(handle))
        _call(handle.context, "delete_job", handle.job_id)
        return []


def build_status(handle: Handle, info: Any, log: str) -> JobStatus:
    events = read_events(log)
    state = STATES[info.status]
    last = events[-1] if events else {}
    if state == "running":
        state = ACTIVE_STATES.get(last.get("state", "starting"), "running")
    reason = last.get("message", "") if info.status == "RUNNING" else str(info.message or "")
    metadata = info.metadata or {}
    price = metadata.get("usd_per_hour")
    code = 0 if state == "succeeded" else info.driver_exit_code
    failure = JobFailure("unknown", message=first_line(info.message)) if state == "failed" else None
    return JobStatus(
        handle,
        state,
        reason=reason,
        attempt=last.get("attempt"),
        nodes=tuple(_list_nodes(events, state)),
        exit_code=code if state in FINAL_STATES else None,
        failure=failure,
        usd_per_hour=float(price) if price else None,
        price_date=metadata.get("price_date"),
        output=metadata.get("output", ""),
        submitted_at=format_epoch(info.start_time),
        started_at=next((event["time"] for event in events if event.get("hosts")), None),
        finished_at=format_epoch(info.end_time),
    )


def _list_nodes(events: list[Tables], state: JobState) -> Iterator[NodeStatus]:
    """Yield the nodes in the last attempt that has started."""
    attempt = max((event["attempt"] for event in events if event.get("hosts")), default=0)
    events = [event for event in events if event.get("attempt") == attempt]
    hosts: list[str] = next((event["hosts"] for event in events if event.get("hosts")), [])
    for index, host in enumerate(hosts):
        end = next((event for event in events if event.get("node") == index), None)
        code = end.get("exit_code") if end else None
        if end is None:
            yield NodeStatus(index, state, host, shell_command=f"ssh {host}")
        elif code == 0:
            yield NodeStatus(index, "succeeded", host, code)
        else:
            yield NodeStatus(index, "failed", host, code, end["message"])


def _build_metadata(job: JobSpec) -> dict[str, str]:
    """Return a job's metadata: labels, output folder, and price in USD."""
    metadata = {**job.labels, "output": job.output, "verb": job.verb}
    if job.machine is not None:
        metadata["instance"] = job.machine.name
    if job.usd_per_hour is not None:
        metadata["usd_per_hour"] = f"{job.usd_per_hour:.6g}"
        metadata["price_date"] = job.price_date or ""
    return metadata


def _call(
    address: str, method: str, *arguments: Any, remedy: str = "try again", **keywords: Any
) -> Any:
    """Call a method of Ray's job client.

    Raises PreflightError without Ray, TransientError if the server is unreachable, and
    SettingsError with a remedy if it refuses the request or the token.
    """
    try:
        from ray.exceptions import RayError
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        problem = "target 'ray' needs Ray with its dashboard"
        raise PreflightError(problem, INSTALL_COMMAND) from None
    step_remedy = "set address to the host and port of the dashboard"
    try:
        client = JobSubmissionClient(f"http://{address}")
        step_remedy = remedy
        return getattr(client, method)(*arguments, **keywords)
    except RayError as error:  # the client raises it for a missing or wrong token alone
        problem = f"the Ray cluster at {address} needs a token: {first_line(error)}"
        raise SettingsError(problem, AUTHENTICATION_REMEDY) from None
    except (ConnectionError, OSError) as error:
        problem = f"no Ray job server answers at {address}: {first_line(error)}"
        raise TransientError(problem, "check the address, and that the dashboard runs") from None
    except (RuntimeError, ValueError) as error:
        problem = f"Ray refuses the request: {_find_reason(error)}"
        raise SettingsError(problem, step_remedy) from None


def _find_reason(error: Exception) -> str:
    """Return the remote traceback's last line in a job server error."""
    lines = [line.strip("\"'{}., ") for line in str(error).replace("\\n", "\n").splitlines()]
    return next((line for line in reversed(lines) if line), type(error).__name__)


def _find_job(handle: Handle) -> Any:
    """Return Ray's job record; raises SettingsError if the cluster does not know the job."""
    try:
        return _call(handle.context, "get_job_info", handle.job_id)
    except SettingsError as error:
        if "404" not in error.problem:
            raise
        problem = f"the cluster at {handle.context} has no job '{handle.job_id}'"
        remedy = "correct the handle; Ray forgets its jobs when the head node ends"
        raise SettingsError(problem, remedy) from None


def _read_log(handle: Handle) -> str:
    return str(_call(handle.context, "get_job_logs", handle.job_id) or "")
