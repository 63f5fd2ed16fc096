"""Progress and failure of a job, read from the output folder of its run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regauge.jobs.job_progress import add_progress, read_failure, read_progress
from regauge.jobs.targets import Handle, JobFailure, JobState, JobStatus, Progress


def write_lines(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def build_step(step: int, seconds: float, attempt: int = 1) -> dict[str, Any]:
    return {"attempt": attempt, "step": step, "seconds": seconds, "train/loss": 1.0}


def write_run(folder: Path, stop: dict[str, Any]) -> None:
    """Write a run whose second attempt has done steps 10 to 30 in 8 seconds."""
    write_lines(
        folder / "metrics.jsonl",
        build_step(10, 1.0),
        build_step(20, 99.0),
        build_step(10, 5.0, attempt=2),
        build_step(30, 13.0, attempt=2),
    )
    (folder / "run.json").write_text(json.dumps({"stop": stop}))


def build_status(state: JobState, output: Path | str) -> JobStatus:
    return JobStatus(Handle("local", "here", "job"), state, output=str(output))


@pytest.mark.parametrize(
    ("stop", "files", "progress"),
    [
        ({"steps": 80}, {}, Progress(30, 80, 50 * 8.0 / 20)),
        ({"epochs": 2.0, "steps": None}, {}, Progress(30)),
        ({"epochs": 2.0}, {"result.json": "{}"}, Progress(30, 30, 0.0)),
        ({"steps": 80}, {"run.json": "{"}, Progress(30)),
    ],
    ids=["steps", "epochs", "finished", "a damaged document"],
)
def test_the_remaining_time_follows_from_the_last_attempt(
    tmp_path: Path, stop: dict[str, Any], files: dict[str, str], progress: Progress
) -> None:
    write_run(tmp_path, stop)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert add_progress(build_status("running", tmp_path)).progress == progress


def test_a_run_without_a_step_has_no_progress(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    assert add_progress(build_status("running", tmp_path)) == build_status("running", tmp_path)


def write_failures(folder: Path) -> None:
    """Write two failures of runs with two processes on each of two nodes."""
    (folder / "failures").mkdir()
    for attempt, kind, rank in ((1, "hang", 0), (2, "process", 3)):
        document = {"attempt": attempt, "kind": kind, "rank": rank, "problem": f"problem {attempt}"}
        (folder / "failures" / f"attempt-{attempt:04d}.json").write_text(json.dumps(document))
    write_lines(
        folder / "attempts.jsonl",
        {"attempt": 1, "nodes": 1, "processes": 4},
        {"attempt": 2, "nodes": 2, "processes": 4},
    )


def test_the_last_failure_names_its_rank_and_node(tmp_path: Path) -> None:
    write_failures(tmp_path)
    assert read_failure(tmp_path) == JobFailure("process", 3, 1, "problem 2")
    (tmp_path / "failures" / "attempt-0002.json").write_text('{"kind": 1}')
    assert read_failure(tmp_path) == JobFailure("hang", 0, 0, "problem 1")


@pytest.mark.parametrize(
    "state",
    ["failed", "restarting", "unknown", "preempted", "running", "succeeded", "cancelled"],
)
def test_a_status_gets_the_failure_of_the_run_if_it_did_not_succeed(
    tmp_path: Path, state: JobState
) -> None:
    write_failures(tmp_path)
    has_failure = state not in ("running", "succeeded", "cancelled")
    failure = JobFailure("process", 3, 1, "problem 2") if has_failure else None
    assert add_progress(build_status(state, tmp_path)).failure == failure


@pytest.mark.parametrize("output", ["", "s3://bucket/run", "/none", "relative/none"])
def test_a_folder_that_this_machine_cannot_read_adds_nothing(output: str) -> None:
    status = build_status("failed", output)
    assert add_progress(status) == status


@pytest.mark.parametrize(
    ("code", "kind"),
    [(2, "settings"), (64, "data"), (76, "preflight"), (143, "preempted"), (1, "unknown")],
)
def test_the_exit_code_names_a_failure_before_the_first_attempt(code: int, kind: str) -> None:
    failure = JobFailure("unknown", message="why")
    status = replace(build_status("failed", ""), failure=failure, exit_code=code)
    assert add_progress(status).failure == JobFailure(kind, message="why")
