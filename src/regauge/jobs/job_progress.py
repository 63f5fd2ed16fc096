"""Progress and failure of a job's run, read from its output folder if this machine has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from regauge.config.output_files import ATTEMPTS, RESULT
from regauge.jobs.targets import JobFailure, JobStatus, Progress, is_local_folder
from regauge.run_folders.documents import (
    AttemptLine,
    FailureShape,
    list_failures,
    read_document,
)
from regauge.run_folders.run_tail import read_run_tail
from regauge.system import jsonl
from regauge.system.errors import RegaugeError

FAILURE_STATES = ("failed", "preempted", "restarting", "unknown")
"""States for which the last failure of the run is reported."""


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
    """Return the progress of a training run; None if it has logged no step."""
    tail = read_run_tail(folder)
    if not tail.metrics:
        return None
    progress = tail.find_progress(is_finished=(folder / RESULT).is_file())
    if progress is None:
        return None
    step, total, eta = progress
    return Progress(step, total, None if eta is None else round(eta, 1))


def read_failure(folder: Path) -> JobFailure | None:
    """Return the last failure of a training run with its rank and node; None if there is none."""
    for path in reversed(list_failures(folder)):
        if document := read_document(path, FailureShape):
            node = document["rank"] // _count_ranks_per_node(folder, document.get("attempt"))
            return JobFailure(document["kind"], document["rank"], node, document["problem"])
    return None


def _count_ranks_per_node(folder: Path, attempt: int | None) -> int:
    """Return the processes per node of an attempt, at least 1."""
    for line in jsonl.read_lines(folder / ATTEMPTS, AttemptLine):
        if line["attempt"] == attempt and "processes" in line:
            return max(1, int(line["processes"]) // int(line.get("nodes", 1)))
    return 1
