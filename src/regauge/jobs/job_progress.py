"""Progress and failure of a job's run, read from its output folder if this machine has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from regauge.config import SAVED_RUN
from regauge.jobs.targets import JobFailure, JobStatus, Progress, is_local_folder
from regauge.run_folders.cost_meter import ATTEMPTS, AttemptLine
from regauge.supervision.attempt import FAILURES
from regauge.system import jsonl
from regauge.system.errors import RegaugeError
from regauge.system.json_files import DocumentShape, find_json, find_mismatch

METRICS, RESULT = "metrics.jsonl", "result.json"
FAILURE_STATES = ("failed", "preempted", "restarting", "unknown")
"""States for which the last failure of the run is reported."""
REMEDY = "remove it"
"""Remedy of an error about a damaged file; `add_progress` ignores such files."""


class StepMetrics(jsonl.StepLine):
    """A line of `metrics.jsonl`."""

    seconds: float | None = None


class FailureDocument(DocumentShape):
    """A document of `failures/`."""

    kind: str
    rank: int
    problem: str


def add_progress(status: JobStatus) -> JobStatus:
    """Return a status with the progress and the failure of its run, if they can be read.

    A file that is missing or damaged adds nothing. An object store is not read.
    """
    folder = Path(status.output)
    if not is_local_folder(status.output) or not folder.is_dir():
        return status
    try:
        failure = status.failure
        if status.state in FAILURE_STATES:
            failure = read_failure(folder) or failure
        return replace(status, progress=status.progress or read_progress(folder), failure=failure)
    except (RegaugeError, OSError):
        return status


def read_progress(folder: Path) -> Progress | None:
    """Return the progress of a training run; None if it has logged no step.

    `eta_seconds` is the mean step time of the last attempt times the remaining steps. It is 0 for a
    finished run, and None if the number of steps is unknown.
    """
    lines = jsonl.read_lines(folder / METRICS, StepMetrics)
    if not lines:
        return None
    step = int(lines[-1]["step"])
    total = _read_total_steps(folder)
    if (folder / RESULT).is_file():
        return Progress(step, step, 0.0)
    attempt = [line for line in lines if line["attempt"] == lines[-1]["attempt"]]
    timed_lines = [line for line in attempt if line.get("seconds") is not None]
    eta = None
    num_steps = timed_lines[-1]["step"] - timed_lines[0]["step"] if timed_lines else 0
    if total is not None and num_steps > 0:
        seconds = timed_lines[-1]["seconds"] - timed_lines[0]["seconds"]
        eta = round((total - step) * seconds / num_steps, 1)
    return Progress(step, total, eta)


def read_failure(folder: Path) -> JobFailure | None:
    """Return the last failure of a training run with its rank and node; None if there is none."""
    for path in sorted((folder / FAILURES).glob("attempt-*.json"), reverse=True):
        document = find_json(path, REMEDY)
        if document is not None and not find_mismatch(document, FailureDocument):
            node = document["rank"] // _count_ranks_per_node(folder, document.get("attempt"))
            return JobFailure(document["kind"], document["rank"], node, document["problem"])
    return None


def _read_total_steps(folder: Path) -> int | None:
    """Return the number of steps of a run; None if its length is given in epochs or by a limit."""
    document: dict[str, Any] = find_json(folder / SAVED_RUN, REMEDY) or {}
    steps = (document.get("stop") or {}).get("steps")
    return steps if isinstance(steps, int) else None


def _count_ranks_per_node(folder: Path, attempt: int | None) -> int:
    """Return the processes per node of an attempt, at least 1."""
    for line in jsonl.read_lines(folder / ATTEMPTS, AttemptLine):
        if line["attempt"] == attempt and "processes" in line:
            return max(1, int(line["processes"]) // int(line.get("nodes", 1)))
    return 1
