"""The folder of a job of simulated nodes: its document, its events and its logs.

| file | content |
| --- | --- |
| `job.json` | the document of the plan: the command of a node and the limits |
| `events.jsonl` | starts and ends of nodes, and states of the job |
| `cancel` | exists if a user wants the job to stop |
| `scheduler.log` | output of the process that runs the job, and holds the lock `.lock` |
| `logs/attempt-<n>/node-<n>.log` | output of a node in an attempt |
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from regauge.config import FORMAT, check_format
from regauge.jobs.targets import PIPELINE_FIELDS, JobSpec, LeaderAddress, Machine, NodeCommand
from regauge.jobs.targets._nodes import build_rendezvous_variables
from regauge.system import jsonl
from regauge.system.files import LOCK, hold_lock
from regauge.system.json_files import DocumentShape, find_json

JOB_FILE, EVENTS, CANCEL, LOGS = "job.json", "events.jsonl", "cancel", "logs"
SCHEDULER_LOG = "scheduler.log"
SIMULATED = frozenset({"image", "volumes", "spot", "shared_memory_gib"})
"""Fields about machines and containers, which a process of this machine does not need."""
ARRAY_VARIABLE = "JOB_COMPLETION_INDEX"
"""Variable with the index of a job of an array, as in Kubernetes' indexed Jobs."""


class EventLine(DocumentShape):
    """A line of `events.jsonl`."""

    time: str
    message: str
    attempt: int = 1
    state: str | None = None
    node: int | None = None
    node_state: str | None = None
    exit_code: int | None = None
    pid: int | None = None


def build_document(job: JobSpec, folder: str) -> dict[str, Any]:
    """Return the document of a job that runs in a working folder."""
    unused = SIMULATED | PIPELINE_FIELDS
    values = {name: value for name, value in asdict(job).items() if name not in unused}
    values["command"] = list(job.command)
    return {"format": FORMAT, "working_folder": folder, "job": values}


def read_document(folder: Path) -> dict[str, Any] | None:
    """Return the document in the folder of a job; None if there is none."""
    document = find_json(folder / JOB_FILE, "remove the folder")
    if document is not None:
        check_format(document, folder / JOB_FILE, "remove the folder")
    return document


def parse_job(document: dict[str, Any]) -> JobSpec:
    """Return the job of a document."""
    known = {field.name for field in fields(JobSpec)}
    values = {name: value for name, value in document["job"].items() if name in known}
    values["command"] = tuple(values["command"])
    values["machine"] = Machine(**values["machine"]) if values["machine"] else None
    return JobSpec(**values)


def build_node_commands(document: dict[str, Any], leader: LeaderAddress) -> list[NodeCommand]:
    """Return the processes of the nodes, or of the jobs of an array."""
    job = parse_job(document)
    variables = {**job.environment, **build_rendezvous_variables(job, leader)}
    if job.jobs == 1:
        return [NodeCommand(node, job.command, variables) for node in range(job.max_nodes)]
    return [
        NodeCommand(index, job.command, {**variables, ARRAY_VARIABLE: str(index)})
        for index in range(job.jobs)
    ]


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a job, oldest first."""
    return jsonl.read_lines(folder / EVENTS, EventLine)


def is_scheduled(folder: Path) -> bool:
    """Return whether the process that runs a job lives, because it holds the lock."""
    try:
        with hold_lock(folder / LOCK):
            return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False


def find_default_root() -> Path:
    """Return the folder of all jobs of this user, by the XDG Base Directory Specification."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return base / "regauge" / "jobs"


def build_scheduler_command(folder: Path) -> tuple[str, ...]:
    """Return the command line of the process that runs a job."""
    return (sys.executable, "-m", "regauge.jobs.targets._local_scheduler", str(folder))


def read_last_line(path: Path) -> str:
    """Return the last line of a text file; empty if there is none."""
    with suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
    return ""
