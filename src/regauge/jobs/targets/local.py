"""Simulated nodes on this machine: every node of a job is a process."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

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
    Leftover,
    NodeStatus,
    is_local_folder,
)
from regauge.jobs.targets._job_end import (
    build_active_error,
    build_ended_error,
    list_output_leftovers,
    wait_for_end,
)
from regauge.jobs.targets._job_runner import GRACE_SECONDS, build_log_path
from regauge.jobs.targets._local_job import (
    CANCEL,
    JOB_FILE,
    LOGS,
    SCHEDULER_LOG,
    SIMULATED,
    build_document,
    build_node_commands,
    build_scheduler_command,
    find_default_root,
    is_scheduled,
    parse_job,
    read_document,
    read_events,
    read_last_line,
)
from regauge.jobs.targets._secret_files import check_secret_files
from regauge.system.errors import WRONG_KIND_ERRNOS, ChildError, SettingsError
from regauge.system.files import write_atomic
from regauge.system.processes import INHERITED_ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.jobs.targets import LeaderAddress, LogRequest, NodeCommand

USED = COMMON_FIELDS | {"jobs"}
START_SECONDS = 60.0
"""Maximum time until the scheduler of a job runs."""
CANCEL_SECONDS = GRACE_SECONDS + 10.0
LOG_POLL_SECONDS = 0.2


class LocalNodes(Launcher):
    """Simulated nodes: processes of this machine that meet on the loopback interface."""

    supports_elastic: ClassVar[bool] = True
    supports_arrays: ClassVar[bool] = True

    folder: str | None = None
    """Folder of the jobs; by default `regauge/jobs` in the user's state folder."""

    def plan(self, job: JobSpec) -> LaunchPlan:
        check_secret_files(job)
        if job.rendezvous == "etcd" and job.max_nodes > 1 and job.rendezvous_endpoint is None:
            problem = "execution.nodes.rendezvous is etcd, and no endpoint is set"
            raise SettingsError(problem, "set execution.nodes.endpoint to its host and port")
        return LaunchPlan(
            job,
            documents=(Document(JOB_FILE, build_document(job, str(Path.cwd()))),),
            commands=(build_scheduler_command(self._find_folder(job.name)),),
            notes=_list_notes(job),
            restart_policy=_describe_restarts(job),
            used=USED | SIMULATED,
        )

    def list_node_commands(self, plan: LaunchPlan, leader: LeaderAddress) -> list[NodeCommand]:
        return build_node_commands(plan.documents[0].content, leader)

    def submit(self, plan: LaunchPlan) -> Handle:
        """Start the process that runs the job; it outlives this one."""
        folder = self._find_folder(plan.job.name)
        handle = _build_handle(folder)
        _create_folder(folder, plan, handle)
        try:
            _start_scheduler(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return handle

    def find_status(self, handle: Handle) -> JobStatus:
        folder = _find_job(handle)
        job = _read_job(folder)
        is_alive = is_scheduled(folder)  # read first: the last event precedes the end of the lock
        events = read_events(folder)
        states = [event for event in events if "state" in event]
        last: dict[str, Any] = states[-1] if states else {}
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
            nodes=_read_nodes(events, is_alive=is_alive),
            exit_code=last.get("exit_code") if is_final else None,
            failure=_find_failure(folder, last) if state == "failed" else None,
            usd_per_hour=job.usd_per_hour,
            price_date=job.machine.price_date if job.machine else None,
            output=_find_output(folder),
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
            for event in read_events(_find_job(handle))
        ]

    def read_log(self, handle: Handle, request: LogRequest) -> Iterator[str]:
        path = _find_log(_find_job(handle), request)
        with path.open(encoding="utf-8", errors="replace") as file:
            line = ""
            is_last = not request.follow
            while True:
                text = file.readline()
                line += text
                if line.endswith("\n"):
                    yield line[:-1]
                    line = ""
                elif not text and is_last:
                    break
                elif not text:
                    is_last = _has_ended(self.find_status(handle))  # then read the rest once more
                    time.sleep(0.0 if is_last else LOG_POLL_SECONDS)
            if line:
                yield line

    def cancel(self, handle: Handle) -> None:
        """Stop a job and wait until its nodes have ended."""
        status = self.find_status(handle)
        if _has_ended(status):
            raise build_ended_error(handle, status.state)
        write_atomic(_find_job(handle) / CANCEL, "")
        wait_for_end(
            handle, lambda: _has_ended(self.find_status(handle)), CANCEL_SECONDS, LOG_POLL_SECONDS
        )

    def clean_up(self, handle: Handle) -> list[Leftover]:
        folder, status = _find_job(handle), self.find_status(handle)
        if not _has_ended(status):
            raise build_active_error(handle, status.state)
        output = _find_output(folder)
        shutil.rmtree(folder)
        return list_output_leftovers(output)

    def _find_folder(self, name: str) -> Path:
        root = Path(self.folder).expanduser() if self.folder else find_default_root()
        return root.absolute() / name


def _has_ended(status: JobStatus) -> bool:
    """Return whether no process of a job runs; its state is unknown if its scheduler has died."""
    return status.is_final or status.state == "unknown"


def _list_notes(job: JobSpec) -> tuple[str, ...]:
    """Return the decisions of a plan."""
    notes = []
    defaults = JobSpec("", "", (), 1, 1, 1)
    unused = sorted(name for name in SIMULATED if getattr(job, name) != getattr(defaults, name))
    if unused:
        names = ", ".join(f"launch.{name}" for name in unused)
        notes.append(f"Nodes are processes of this machine, so {names} has no effect.")
    if job.jobs > 1:
        notes.append("As many jobs run at the same time as this machine has cores.")
    elif job.max_nodes > 1:
        count = f"{job.min_nodes} to {job.max_nodes}" if job.is_elastic else str(job.max_nodes)
        notes.append(f"The {count} nodes share the devices of this machine.")
    return tuple(notes)


def _describe_restarts(job: JobSpec) -> str:
    """Return the reaction to the loss of a node, as one or two sentences."""
    attempts = f"at most {job.max_attempts} attempts"
    if job.jobs > 1:
        return f"A lost job starts again by itself, {attempts}; the other jobs continue."
    if job.max_nodes == 1:
        return f"The node starts again and resumes from its checkpoint, {attempts}."
    if job.is_elastic:
        text = f"At least {job.min_nodes} nodes continue; the lost node joins again"
        return f"{text}, {attempts}. After the loss of node 0 all nodes start again."
    text = "The other nodes wait for the lost node, which starts again"
    return f"{text}, {attempts}. After the loss of node 0 all nodes start again."


def _create_folder(folder: Path, plan: LaunchPlan, handle: Handle) -> None:
    """Create the folder of a job with its documents atomically.

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

    Raises ChildError with the last line of its log if it does not start.
    """
    environment = dict(os.environ)
    environment.pop("TMPDIR", None)  # the folder of this command, which ends with it
    if "TMPDIR" in INHERITED_ENVIRONMENT:
        environment["TMPDIR"] = INHERITED_ENVIRONMENT["TMPDIR"]
    log = folder / SCHEDULER_LOG
    with log.open("wb") as file:
        process = subprocess.run(
            build_scheduler_command(folder),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            check=False,
            timeout=START_SECONDS,
        )
    if process.returncode:
        raise ChildError(process.returncode, read_last_line(log) or f"no job starts in {folder}")


def _build_handle(folder: Path) -> Handle:
    return Handle(LocalNodes.kind, socket.gethostname(), str(folder).lstrip("/"))


def _find_job(handle: Handle) -> Path:
    """Return the folder of a job; raises SettingsError if this machine has no such job."""
    host = socket.gethostname()
    if handle.context != host:
        problem = f"{handle} runs on host '{handle.context}', and this is '{host}'"
        raise SettingsError(problem, "run the command on that host")
    folder = Path("/") / handle.job_id
    if not (folder / JOB_FILE).is_file():
        problem = f"no job {handle}"
        raise SettingsError(problem, "use the handle that `launch` printed")
    return folder


def _read_job(folder: Path) -> JobSpec:
    return parse_job(_read_document(folder))


def _read_document(folder: Path) -> dict[str, Any]:
    document = read_document(folder)
    if document is None:
        raise SettingsError(f"no job in {folder}", "use the handle that `launch` printed")
    return document


def _find_output(folder: Path) -> str:
    """Return the absolute output folder of a run; an address of an object store is unchanged."""
    document = _read_document(folder)
    output = document["job"]["output"]
    if not is_local_folder(output):
        return str(output)
    return str(Path(document["working_folder"]) / Path(output).expanduser())


def _read_nodes(events: list[dict[str, Any]], *, is_alive: bool) -> tuple[NodeStatus, ...]:
    """Return the last state of every node."""
    nodes: dict[int, NodeStatus] = {}
    for event in events:
        if "node_state" in event:
            state = event["node_state"]
            if state == "running" and not is_alive:
                state = "unknown"
            nodes[event["node"]] = NodeStatus(
                event["node"],
                state,
                socket.gethostname(),
                event.get("exit_code"),
                event["message"],
            )
    return tuple(nodes[index] for index in sorted(nodes))


def _find_failure(folder: Path, last: dict[str, Any]) -> JobFailure | None:
    """Return the node that ended a job, with the last line of its log."""
    node = last.get("node")
    if node is None:
        return None
    attempts = _list_attempts(folder, node)
    log = build_log_path(folder / LOGS, attempts[0] if attempts else 1, node)
    return JobFailure("unknown", node=node, message=read_last_line(log))


def _find_log(folder: Path, request: LogRequest) -> Path:
    """Return the log of a rank; the log of rank 0 is the output of the first node.

    Other ranks of a training run write to `ranks/` in the output folder, one file for all attempts.
    Raises SettingsError if the log does not exist.
    """
    job, rank = _read_job(folder), request.rank or 0
    ranks = Path(_find_output(folder)) / "ranks" / f"{rank}.log"
    if rank and request.attempt is None and job.jobs == 1 and ranks.is_file():
        return ranks
    per_node = job.processes if isinstance(job.processes, int) and job.jobs == 1 else 1
    node = rank // per_node
    attempts = [request.attempt] if request.attempt is not None else _list_attempts(folder, node)
    for attempt in attempts:
        path = build_log_path(folder / LOGS, attempt, node)
        if path.is_file():
            return path
    suffix = f" in attempt {request.attempt}" if request.attempt is not None else ""
    known = sorted(str(path.relative_to(folder / LOGS)) for path in folder.glob(f"{LOGS}/*/*.log"))
    remedy = f"known logs: {', '.join(known)}" if known else "wait until a node starts"
    raise SettingsError(f"no log of rank {rank}{suffix}", remedy)


def _list_attempts(folder: Path, node: int) -> list[int]:
    """Return the attempts in which a node started, the last one first."""
    paths = folder.glob(f"{LOGS}/attempt-*/node-{node}.log")
    return sorted((int(path.parent.name.removeprefix("attempt-")) for path in paths), reverse=True)
