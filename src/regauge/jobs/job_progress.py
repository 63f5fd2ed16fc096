"""A job's progress and failure, read from the output folder if this machine can see it."""

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
from regauge.supervision.failures import KIND_BY_ERROR
from regauge.system import jsonl
from regauge.system.errors import RegaugeError

FAILURE_STATES = ("failed", "preempted", "restarting", "unknown")
"""States in which the run's last failure is reported."""

KIND_BY_CODE = {error.exit_code: kind for error, kind in KIND_BY_ERROR.items()}
"""Exit code -> failure kind."""


def add_progress(status: JobStatus) -> JobStatus:
    """Add a run's progress and failure to a status, if they can be read.

    A missing or damaged file adds nothing. Object stores are not read. The exit code names the kind
    of a failure before the run's first attempt.
    """
    if status.failure is not None and status.failure.kind == "unknown":
        kind = KIND_BY_CODE.get(status.exit_code or 0, "unknown")
        status = replace(status, failure=replace(status.failure, kind=kind))
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
    """Return a training run's progress; None before the first logged step."""
    tail = read_run_tail(folder)
    if not tail.metrics:
        return None
    progress = tail.find_progress(is_finished=(folder / RESULT).is_file())
    if progress is None:
        return None
    step, total, eta = progress
    return Progress(step, total, None if eta is None else round(eta, 1))


def read_failure(folder: Path) -> JobFailure | None:
    for path in reversed(list_failures(folder)):
        if document := read_document(path, FailureShape):
            node = document["rank"] // _count_ranks_per_node(folder, document.get("attempt"))
            return JobFailure(document["kind"], document["rank"], node, document["problem"])
    return None


def _count_ranks_per_node(folder: Path, attempt: int | None) -> int:
    """Return an attempt's processes per node, at least 1."""
    for line in jsonl.read_lines(folder / ATTEMPTS, AttemptLine):
        if line["attempt"] == attempt and "processes" in line:
            return max(1, int(line["processes"]) // int(line.get("nodes", 1)))
    return 1
