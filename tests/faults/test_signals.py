"""SIGTERM and Ctrl-C in every phase of a run: rows 27 to 29 of the fault matrix."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from distributed.test_resume import assert_same
from faults.conftest import FULL, Job, Jobs, terminate
from faults.families import ranks

GRACE_SECONDS = 30.0


def stopped(job: Job, attempt: int = 1) -> int:
    """Assert that an attempt was told to stop and saved; return the step it saved at."""
    assert job.process is not None
    began = time.monotonic()
    job.wait()
    assert time.monotonic() - began < GRACE_SECONDS
    assert job.code == 143, job.said
    assert not (job.folder / "failures").exists()
    (last,) = [line for line in job.attempts if line["attempt"] == attempt]
    assert last["end"] == "preempted"
    return int(last["step"])


def goes_on(jobs: Jobs, job: Job) -> None:
    """Assert that the same command ends the run as if it had not been stopped."""
    job.faults = []
    job.start().wait()
    assert job.code == 0, job.said
    assert_same(jobs.whole(job), job.folder)
    jobs.nothing_is_left(job)


@FULL
def test_a_process_that_is_told_to_stop_saves_with_the_others(jobs: Jobs) -> None:
    """The second process alone gets the signal, in another phase each time; all save one step."""
    places = [("step", 4), ("data", 9), ("evaluate", 12), ("save:staged", 18)]
    faults = [
        {"kind": "terminate", "at": at, "rank": 1, "step": step, "attempt": attempt}
        for attempt, (at, step) in enumerate(places, start=1)
    ]
    job = jobs.job(*faults, evaluation={"every_steps": 6})
    for attempt, (at, step) in enumerate(places, start=1):
        saved = stopped(job.start(), attempt)
        assert len(job.struck) == attempt, at
        assert step <= saved <= step + 2, "more than one step was lost to the answer"
        document = json.loads((checkpoint(job, saved) / "state.json").read_text())
        assert document["step"] == saved
    goes_on(jobs, job)


def checkpoint(job: Job, step: int) -> Path:
    return job.folder / "checkpoints" / f"step-{step:08d}"


@FULL
def test_a_job_that_is_told_to_stop_saves(jobs: Jobs) -> None:
    job = jobs.job({"kind": "sleep", "rank": 0, "step": 8, "count": 8, "seconds": 0.3}).start()
    job.until(9)
    terminate(job)
    saved = stopped(job)
    assert 9 <= saved < 24
    assert "stopped by a signal, saved at step" in job.said.splitlines()[-1]
    goes_on(jobs, job)


@FULL
def test_a_job_that_is_told_to_stop_before_its_first_step_has_nothing_to_save(jobs: Jobs) -> None:
    job = jobs.job().start()
    assert job.process is not None
    deadline = time.monotonic() + GRACE_SECONDS
    while len(ranks(job.process.pid)) < job.size and time.monotonic() < deadline:
        time.sleep(0.01)
    terminate(job)
    job.wait()
    assert job.code == 143
    assert "told to stop" in job.said
    goes_on(jobs, job)


@FULL
def test_a_second_signal_in_the_save_leaves_no_half_of_it(jobs: Jobs) -> None:
    slow = {"kind": "sleep", "at": "save:staged", "rank": 0, "step": 0, "count": 24, "seconds": 3}
    job = jobs.job(slow).start()
    assert job.process is not None
    job.until(8)
    terminate(job)
    time.sleep(1.0)
    for pid in ranks(job.process.pid):
        os.kill(pid, signal.SIGTERM)
    job.wait()
    assert job.code != 0
    goes_on(jobs, job)
