"""A local job's folder: document, events and logs.

| file | content |
| --- | --- |
| `job.json` | the plan's document: a node's command and the limits |
| `events.jsonl` | node starts and ends, and job states |
| `cancel` | exists if a user wants the job to stop |
| `scheduler.log` | output of the process that runs the job and holds the lock `.lock` |
| `logs/attempt-<n>/node-<n>.log` | a node's output in one attempt |
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from regauge.config import FORMAT, check_format
from regauge.jobs.targets import (
    PIPELINE_FIELDS,
    JobSpec,
    LeaderAddress,
    LogRequest,
    NodeCommand,
    is_local_folder,
)
from regauge.jobs.targets._job_runner import build_log_path
from regauge.jobs.targets._nodes import build_rendezvous_variables
from regauge.jobs.targets._times import format_now
from regauge.system import jsonl
from regauge.system.errors import SettingsError
from regauge.system.files import LOCK, hold_lock
from regauge.system.json_files import DocumentShape, find_json

JOB_FILE = "job.json"
SIMULATED = frozenset({"image", "volumes", "spot", "shared_memory_gib"})
"""Fields about machines and containers, which a local process does not need."""
ARRAY_VARIABLE = "JOB_COMPLETION_INDEX"
"""Array job index variable, as in Kubernetes' Indexed Jobs."""


class EventLine(DocumentShape):
    """A line in `events.jsonl`."""

    time: str
    message: str
    attempt: int = 1
    state: str | None = None
    node: int | None = None
    node_state: str | None = None
    exit_code: int | None = None
    pid: int | None = None


def build_document(job: JobSpec, folder: str) -> dict[str, Any]:
    """Return the document for a job that runs in a working folder."""
    unused = SIMULATED | PIPELINE_FIELDS
    values = {name: value for name, value in asdict(job).items() if name not in unused}
    values["command"] = list(job.command)
    return {"format": FORMAT, "working_folder": folder, "job": values}


def parse_job(document: dict[str, Any]) -> JobSpec:
    """Parse a job's document; raises ValidationError if it is damaged."""
    return TypeAdapter(JobSpec).validate_python(document["job"])


def build_node_commands(job: JobSpec, leader: LeaderAddress) -> list[NodeCommand]:
    variables = {**job.environment, **build_rendezvous_variables(job, leader)}
    if job.jobs == 1:
        return [NodeCommand(node, job.command, variables) for node in range(job.max_nodes)]
    return [
        NodeCommand(index, job.command, {**variables, ARRAY_VARIABLE: str(index)})
        for index in range(job.jobs)
    ]


class JobFolder:
    """A job's folder, written by the scheduler and read by all other commands."""

    def __init__(self, path: Path) -> None:
        self.path, self.logs = path, path / "logs"
        self.scheduler_log = path / "scheduler.log"
        self.cancel_file = path / "cancel"
        self._events = path / "events.jsonl"

    @cached_property
    def document(self) -> dict[str, Any]:
        """The plan's document; raises SettingsError without a job."""
        document = find_json(self.path / JOB_FILE, "remove the folder")
        if document is None:
            raise SettingsError(f"no job in {self.path}", "use the handle that `launch` printed")
        check_format(document, self.path / JOB_FILE, "remove the folder")
        return document

    @cached_property
    def job(self) -> JobSpec:
        return parse_job(self.document)

    @property
    def output(self) -> str:
        """The absolute output folder; an object store address is unchanged."""
        output = self.job.output
        if not is_local_folder(output):
            return output
        return str(Path(self.document["working_folder"]) / Path(output).expanduser())

    @property
    def is_scheduled(self) -> bool:
        """Whether the process that runs the job is alive and holds the lock."""
        try:
            with hold_lock(self.path / LOCK):
                return False
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False

    def read_events(self) -> list[dict[str, Any]]:
        return jsonl.read_lines(self._events, EventLine)

    def write_event(self, message: str, **values: Any) -> None:
        """Append an event with the current time; unset values are left out."""
        line = {name: value for name, value in values.items() if value is not None}
        jsonl.append_line(self._events, {"time": format_now(), "message": message, **line})

    def list_attempts(self, node: int) -> list[int]:
        """Return the attempts in which a node started, the last one first."""
        folders = (path.parent.name for path in self.logs.glob(f"attempt-*/node-{node}.log"))
        return sorted((int(name.removeprefix("attempt-")) for name in folders), reverse=True)

    def find_log(self, request: LogRequest) -> Path:
        """Return a rank's log; rank 0 logs to the first node's output.

        Other ranks in a training run write to `ranks/` in the output folder, one file for all
        attempts. Raises SettingsError if the log does not exist.
        """
        job, rank, attempt = self.job, request.rank or 0, request.attempt
        path = Path(self.output) / "ranks" / f"{rank}.log"
        if rank and attempt is None and job.jobs == 1 and path.is_file():
            return path
        per_node = job.processes if isinstance(job.processes, int) and job.jobs == 1 else 1
        node = rank // per_node
        for number in self.list_attempts(node) if attempt is None else [attempt]:
            path = build_log_path(self.logs, number, node)
            if path.is_file():
                return path
        suffix = "" if attempt is None else f" in attempt {attempt}"
        known = sorted(str(path.relative_to(self.logs)) for path in self.logs.glob("*/*.log"))
        remedy = f"known logs: {', '.join(known)}" if known else "wait until a node starts"
        raise SettingsError(f"no log of rank {rank}{suffix}", remedy)
