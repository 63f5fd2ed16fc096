"""Processes that die, leave, hang or are slow: rows 1 to 9 and 41 of the fault matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from faults.conftest import FULL, Jobs
from regauge.jsonl import whole
from regauge.reporting.page import tell
from regauge.reporting.render import markdown
from regauge.results.run_folder import read

DEATHS = [("segfault", "SIGSEGV"), ("abort", "SIGABRT"), ("leave", "left before")]


@FULL
@pytest.mark.parametrize("deaths", [[("kill", "SIGKILL")], DEATHS])
def test_a_process_that_dies_is_named_and_the_run_goes_on(
    jobs: Jobs, deaths: list[tuple[str, str]], figure: Callable[[str, float], None]
) -> None:
    faults = [
        {"kind": kind, "rank": 1, "step": 9 + attempt, "attempt": attempt}
        for attempt, (kind, _) in enumerate(deaths, start=1)
    ]
    job = jobs.survives(jobs.job(*faults))
    assert [line["end"] for line in job.attempts] == ["process"] * len(deaths) + ["finished"]
    assert len(job.failures) == len(deaths)
    for number, (kind, said) in enumerate(deaths):
        failure = job.failures[number]
        assert failure["kind"] == "process"
        assert failure["rank"] == 1
        assert failure["step"] == 10 + number
        assert failure["retryable"]
        assert said in failure["problem"]
        noticed = job.attempts[number]["ended"] - job.struck[number]["time"]
        figure(f"seconds to notice {kind}", noticed)
        assert said in job.said


@FULL
def test_an_exception_is_tried_once_more_and_then_is_the_user_s(jobs: Jobs) -> None:
    job = jobs.job({"kind": "raise", "rank": 1, "step": 10, "attempt": 0})
    job.options = ("--traceback",)
    job.start().wait()
    assert job.code == 64
    assert "RuntimeError in regauge/faults.py" in job.said.splitlines()[-1]
    assert "In process 1:\nTraceback (most recent call last):" in job.said
    assert 'raise RuntimeError("injected by the fault plan")' in job.said
    first, second = job.failures
    assert first["kind"] == second["kind"] == "user"
    assert first["rank"] == second["rank"] == 1
    assert "injected by the fault plan" in "\n".join(first["evidence"]["traceback"])
    assert len(job.struck) == 2
    jobs.nothing_is_left(job)


@FULL
def test_an_exception_that_does_not_come_again_is_survived(jobs: Jobs) -> None:
    job = jobs.survives(jobs.job({"kind": "raise", "rank": 0, "step": 10}))
    assert [failure["kind"] for failure in job.failures] == ["user"]


@pytest.mark.parametrize(
    ("kind", "rank"),
    [("stop", 1), pytest.param("block", 1, marks=FULL), pytest.param("stop", 0, marks=FULL)],
)
def test_a_process_that_hangs_is_named_and_the_run_goes_on(
    jobs: Jobs, kind: str, rank: int, figure: Callable[[str, float], None]
) -> None:
    job = jobs.survives(jobs.job({"kind": kind, "rank": rank, "step": 10}))
    (failure,) = job.failures
    assert failure["kind"] == "hang"
    assert failure["rank"] == rank
    assert failure["step"] == 10
    assert "no sign for" in failure["problem"]
    figure(f"seconds to notice {kind}", job.attempts[0]["ended"] - job.struck[0]["time"])
    stack = failure["evidence"]["stacks"][str(1 - rank)]
    assert any("regauge/training/gradients.py" in line for line in stack)


@FULL
def test_a_collective_that_one_process_leaves_out_is_told_of(jobs: Jobs) -> None:
    """Gloo sees a message of another size and aborts; where it cannot, the others wait."""
    job = jobs.survives(jobs.job({"kind": "skip-collective", "rank": 1, "step": 10}))
    (failure,) = job.failures
    if failure["kind"] == "process":
        assert any("in all_reduce" in line for line in failure["evidence"]["stack"])
    told = failure["evidence"]["collectives"][str(1 - failure["rank"])]
    assert told[-1]["profiling_name"] == "gloo:all_reduce"


@FULL
def test_a_process_that_waits_for_something_else_is_behind_in_its_collectives(jobs: Jobs) -> None:
    job = jobs.survives(jobs.job({"kind": "sleep", "rank": 1, "step": 10, "seconds": 1000}))
    (failure,) = job.failures
    assert failure["kind"] == "hang"
    assert failure["rank"] == 1
    told: dict[str, Any] = failure["evidence"]["collectives"]
    assert told["0"][-1]["profiling_name"] == "gloo:all_reduce"
    assert told["0"][-1]["collective_seq_id"] > told["1"][-1]["collective_seq_id"]
    assert any("faults.py" in line for line in failure["evidence"]["stacks"]["1"])


@FULL
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_process_that_is_slow_is_named_and_the_run_goes_on(jobs: Jobs, strategy: str) -> None:
    slow = {"kind": "sleep", "rank": 1, "step": 8, "count": 16, "seconds": 0.5}
    job = jobs.survives(jobs.job(slow, strategy=strategy))
    assert "rank 1 is a straggler" in job.told
    assert len(job.attempts) == 1
    named = [line for line in whole(job.folder / "ledger.jsonl") if line["slowest"]]
    assert {line["slowest"]["rank"] for line in named} == {1}
    assert named[0]["step"] <= 12
    assert "held up by: process 1" in markdown(tell((read(job.folder),)))


@FULL
def test_the_same_fault_for_ever_ends_the_run(jobs: Jobs) -> None:
    job = jobs.job({"kind": "kill", "rank": 1, "step": 10, "attempt": 0})
    job.start().wait()
    assert job.code == 66
    assert "3 attempts failed at step 10 in the same way" in job.said.splitlines()[-1]
    assert len(job.failures) == len(job.struck) == 3
    jobs.nothing_is_left(job)
