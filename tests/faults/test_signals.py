"""SIGTERM and Ctrl-C in every phase of a run: rows 27 to 29 of the fault matrix."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

from distributed.test_resume import assert_same
from faults.conftest import FULL, Job, Jobs, send_sigterm
from faults.families import list_ranks

GRACE_SECONDS = 30.0


def wait_for_save(job: Job, attempt: int = 1) -> int:
    """Assert that an attempt was stopped and saved; return the saved step."""
    assert job.process is not None
    began = time.monotonic()
    job.wait()
    assert time.monotonic() - began < GRACE_SECONDS
    assert job.code == 143, job.stderr
    assert not (job.folder / "failures").exists()
    (last,) = [line for line in job.attempts if line["attempt"] == attempt]
    assert last["outcome"] == "preempted"
    return int(last["step"])


def assert_resumes(jobs: Jobs, job: Job) -> None:
    """Assert that the same command resumes the run and gives the result of an unstopped run."""
    job.faults = []
    job.finish()
    assert_same(jobs.undisturbed_folder(job), job.folder)
    jobs.assert_nothing_is_left(job)


@FULL
def test_a_process_that_is_stopped_saves_with_the_others(jobs: Jobs) -> None:
    """Only the second process gets the signal, in another phase each time; all save one step."""
    points = [("step", 4), ("data", 9), ("evaluate", 12), ("save:staged", 18)]
    faults = [
        {"kind": "terminate", "at": at, "rank": 1, "step": step, "attempt": attempt}
        for attempt, (at, step) in enumerate(points, start=1)
    ]
    job = jobs.create(*faults, evaluation={"every_steps": 6})
    for attempt, (at, step) in enumerate(points, start=1):
        saved = wait_for_save(job.start(), attempt)
        assert len(job.triggered_faults) == attempt, at
        assert step <= saved <= step + 2, "the run stopped more than two steps later"
        document = json.loads((checkpoint(job, saved) / "state.json").read_text())
        assert document["step"] == saved
    assert_resumes(jobs, job)


def checkpoint(job: Job, step: int) -> Path:
    return job.folder / "checkpoints" / f"step-{step:08d}"


@FULL
def test_a_stopped_job_saves(jobs: Jobs) -> None:
    job = jobs.create({"kind": "sleep", "rank": 0, "step": 8, "count": 8, "seconds": 0.3}).start()
    job.wait_for_step(9)
    send_sigterm(job)
    saved = wait_for_save(job)
    assert 9 <= saved < 24
    assert "stopped by a signal, saved at step" in job.stderr.splitlines()[-1]
    assert_resumes(jobs, job)


@FULL
def test_a_job_that_is_stopped_before_its_first_step_has_nothing_to_save(jobs: Jobs) -> None:
    job = jobs.create().start()
    assert job.process is not None
    deadline = time.monotonic() + GRACE_SECONDS
    while len(list_ranks(job.process.pid)) < job.size and time.monotonic() < deadline:
        time.sleep(0.01)
    send_sigterm(job)
    job.wait()
    assert job.code == 143
    problem = r"stopped by a signal (when there was nothing to save|before the run began)"
    assert re.search(problem, job.stderr_line)
    assert_resumes(jobs, job)


@FULL
def test_a_second_signal_during_the_save_leaves_no_partial_checkpoint(jobs: Jobs) -> None:
    slow = {"kind": "sleep", "at": "save:staged", "rank": 0, "step": 0, "count": 24, "seconds": 3}
    job = jobs.create(slow).start()
    assert job.process is not None
    job.wait_for_step(8)
    send_sigterm(job)
    time.sleep(1.0)
    for pid in list_ranks(job.process.pid):
        os.kill(pid, signal.SIGTERM)
    job.wait()
    assert job.code != 0
    assert_resumes(jobs, job)
