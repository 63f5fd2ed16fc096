"""Simulated nodes on this machine: every node in a job is a process."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

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
from regauge.jobs.targets._job_end import cancel_job, check_ended, list_output_leftovers
from regauge.jobs.targets._job_runner import build_log_path, find_grace_seconds
from regauge.jobs.targets._local_job import (
    JOB_FILE,
    JobFolder,
    build_document,
    build_node_commands,
    parse_job,
)
from regauge.jobs.targets._secret_files import check_secret_files
from regauge.system.errors import WRONG_KIND_ERRNOS, ChildError, SettingsError
from regauge.system.files import find_state_folder, write_atomic
from regauge.system.line_tail import LineTail, find_last_line
from regauge.system.processes import INHERITED_ENVIRONMENT
from regauge.system.timing import POLL_SECONDS

ENDED: frozenset[JobState] = FINAL_STATES | {"unknown"}
"""States without processes; a job's state is unknown if its scheduler has died."""
START_SECONDS = 60.0
CANCEL_SECONDS = 10.0
"""Time after the grace period for a cancelled job's end."""


class LocalNodes(Launcher):
    """Simulated nodes: local processes that meet on the loopback interface."""

    supports_elastic: ClassVar[bool] = True
    supports_arrays: ClassVar[bool] = True
    supports_servers: ClassVar[bool] = True

    folder: str | None = None
    """Job folder; by default `regauge/jobs` in the user's state folder."""

    def plan(self, job: JobSpec) -> LaunchPlan:
        check_secret_files(job)
        if job.rendezvous == "etcd" and job.max_nodes > 1 and job.rendezvous_endpoint is None:
            problem = "execution.nodes.rendezvous is etcd, and no endpoint is set"
            raise SettingsError(problem, "set execution.nodes.endpoint to its host and port")
        return LaunchPlan(
            job,
            documents=(Document(JOB_FILE, build_document(_limit_replicas(job), str(Path.cwd()))),),
            commands=(_build_scheduler_command(self._find_folder(job.name)),),
            notes=_list_notes(job),
            restart_policy=_describe_restarts(job),
            used=COMMON_FIELDS | {"jobs"},
        )

    def list_node_commands(self, plan: LaunchPlan, leader: LeaderAddress) -> list[NodeCommand]:
        return build_node_commands(parse_job(plan.documents[0].content), leader)

    def submit(self, plan: LaunchPlan) -> Handle:
        """Start the process that runs the job; it outlives this one."""
        folder = self._find_folder(plan.job.name)
        handle = Handle(self.kind, socket.gethostname(), str(folder).lstrip("/"))
        _create_folder(folder, plan, handle)
        try:
            _start_scheduler(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return handle

    def find_status(self, handle: Handle) -> JobStatus:
        folder = _find_job(handle)
        job = folder.job
        is_alive = folder.is_scheduled  # read first: the last event precedes the end of the lock
        events = folder.read_events()
        last: dict[str, Any] = next((item for item in reversed(events) if "state" in item), {})
        state, reason = cast("JobState", last.get("state", "unknown")), last.get("message", "")
        if state not in FINAL_STATES and not is_alive:
            state, reason = "unknown", "the process that runs the job has died, and its nodes too"
        is_final = state in FINAL_STATES
        started = (event["time"] for event in events if event.get("node_state") == "running")
        return JobStatus(
            handle,
            state,
            reason,
            attempt=max((event.get("attempt", 1) for event in events), default=None),
            nodes=_list_nodes(events, is_alive=is_alive),
            exit_code=last.get("exit_code") if is_final else None,
            failure=_find_failure(folder, last.get("node")) if state == "failed" else None,
            usd_per_hour=job.usd_per_hour,
            price_date=job.price_date,
            output=folder.output,
            submitted_at=events[0]["time"] if events else None,
            started_at=next(started, None),
            finished_at=last["time"] if is_final else None,
        )

    def list_events(self, handle: Handle) -> list[JobEvent]:
        return [
            JobEvent(
                event["time"],
                f"node {event['node']}" if "node_state" in event else "job",
                f"{event['state']}: {event['message']}" if "state" in event else event["message"],
            )
            for event in _find_job(handle).read_events()
        ]

    def read_log(self, handle: Handle, request: LogRequest) -> Iterator[str]:
        reader = LineTail(_find_job(handle).find_log(request))
        while True:
            is_last = not request.follow or self.find_status(handle).state in ENDED
            yield from reader.read(is_last=is_last)
            if is_last:
                return
            time.sleep(POLL_SECONDS)

    def cancel(self, handle: Handle) -> None:
        """Stop a job and wait until its nodes have ended."""
        cancel_job(
            handle,
            self.find_status,
            lambda _: write_atomic(_find_job(handle).cancel_file, ""),
            find_grace_seconds(_find_job(handle).job) + CANCEL_SECONDS,
            ENDED,
        )

    def clean_up(self, handle: Handle) -> list[Leftover]:
        status = self.find_status(handle)
        check_ended(status, ENDED)
        shutil.rmtree(_find_job(handle).path)
        return list_output_leftovers(status.output)

    def _find_folder(self, name: str) -> Path:
        """Return a job's folder, in the user's state folder if none is set."""
        if self.folder:
            return Path(self.folder).expanduser().absolute() / name
        return find_state_folder() / "jobs" / name


def _build_scheduler_command(folder: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "regauge.jobs.targets._local_scheduler", str(folder))


def _limit_replicas(job: JobSpec) -> JobSpec:
    """Limit a server to one replica, because replicas would share the port."""
    return job if job.server is None else replace(job, jobs=1)


def _list_notes(job: JobSpec) -> tuple[str, ...]:
    notes = []
    if job.server is not None:
        notes.append(f"The server answers on port {job.server.port} when it has loaded its models.")
        if job.jobs > 1:
            notes.append("One replica runs, because replicas on one machine would share the port.")
    elif job.jobs > 1:
        notes.append("As many jobs run at the same time as this machine has cores.")
    elif job.max_nodes > 1:
        count = f"{job.min_nodes} to {job.max_nodes}" if job.is_elastic else str(job.max_nodes)
        notes.append(f"The {count} nodes share the devices of this machine.")
    return tuple(notes)


def _describe_restarts(job: JobSpec) -> str:
    attempts = f"at most {job.max_attempts} attempts"
    if job.server is not None:
        return f"A killed server starts again, {attempts}."
    if job.jobs > 1:
        return f"A lost job starts again by itself, {attempts}; the other jobs continue."
    if job.max_nodes == 1:
        return f"The node starts again and resumes from its checkpoint, {attempts}."
    text = "The other nodes wait for the lost node, which starts again"
    if job.is_elastic:
        text = f"At least {job.min_nodes} nodes continue; the lost node joins again"
    return f"{text}, {attempts}. After the loss of node 0 all nodes start again."


def _create_folder(folder: Path, plan: LaunchPlan, handle: Handle) -> None:
    """Create a job's folder with its documents atomically.

    Raises SettingsError if the folder exists.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        staging = Path(name) / folder.name
        staging.mkdir()
        for document in plan.documents:
            write_atomic(staging / document.name, document.text)
        try:
            staging.rename(folder)
        except OSError as error:
            if error.errno not in WRONG_KIND_ERRNOS:
                raise
            problem = f"a job named '{plan.job.name}' exists: {handle}"
            remedy = "set launch.name, or remove it with: regauge job cleanup"
            raise SettingsError(problem, f"{remedy} {handle}") from None


def _start_scheduler(folder: Path) -> None:
    """Start the process that runs a job.

    Raises ChildError with the last log line if it does not start.
    """
    environment = dict(os.environ)
    environment.pop("TMPDIR", None)  # the folder of this command, which ends with it
    if "TMPDIR" in INHERITED_ENVIRONMENT:
        environment["TMPDIR"] = INHERITED_ENVIRONMENT["TMPDIR"]
    log = JobFolder(folder).scheduler_log
    with log.open("wb") as file:
        process = subprocess.run(
            _build_scheduler_command(folder),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            check=False,
            timeout=START_SECONDS,
        )
    if process.returncode:
        raise ChildError(process.returncode, find_last_line(log) or f"no job starts in {folder}")


def _find_job(handle: Handle) -> JobFolder:
    """Return a job's folder; raises SettingsError if this machine does not have the job."""
    host = socket.gethostname()
    if handle.context != host:
        problem = f"{handle} runs on host '{handle.context}', and this is '{host}'"
        raise SettingsError(problem, "run the command on that host")
    path = Path("/") / handle.job_id
    if not (path / JOB_FILE).is_file():
        raise SettingsError(f"no job {handle}", "use the handle that `launch` printed")
    return JobFolder(path)


def _list_nodes(events: list[dict[str, Any]], *, is_alive: bool) -> tuple[NodeStatus, ...]:
    last = {event["node"]: event for event in events if "node_state" in event}
    nodes = []
    for index, event in sorted(last.items()):
        state = event["node_state"]
        if state == "running" and not is_alive:
            state = "unknown"
        host, code = socket.gethostname(), event.get("exit_code")
        nodes.append(NodeStatus(index, state, host, code, event["message"]))
    return tuple(nodes)


def _find_failure(folder: JobFolder, node: int | None) -> JobFailure | None:
    if node is None:
        return None
    attempt = next(iter(folder.list_attempts(node)), 1)
    log = build_log_path(folder.logs, attempt, node)
    return JobFailure("unknown", node=node, message=find_last_line(log))
