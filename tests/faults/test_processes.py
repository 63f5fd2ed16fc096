"""Processes that die, exit, hang or are slow: rows 1 to 9 and 41 of the fault matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from faults.conftest import FULL, Jobs
from regauge.evaluation.report.page import build_report
from regauge.evaluation.report.render import render_markdown
from regauge.run_folders.run_folder import read_run_folder
from regauge.system.jsonl import read_lines

DEATHS = [
    ("segfault", "SIGSEGV"),
    ("abort", "SIGABRT"),
    ("leave", "exited before the end of the run"),
]


@FULL
@pytest.mark.parametrize("deaths", [[("kill", "SIGKILL")], DEATHS])
def test_a_process_that_dies_is_named_and_the_run_continues(
    jobs: Jobs, deaths: list[tuple[str, str]], figure: Callable[[str, float], None]
) -> None:
    faults = [
        {"kind": kind, "rank": 1, "step": 9 + attempt, "attempt": attempt}
        for attempt, (kind, _) in enumerate(deaths, start=1)
    ]
    job = jobs.assert_survives(jobs.create(*faults))
    assert [line["outcome"] for line in job.attempts] == ["process"] * len(deaths) + ["finished"]
    assert len(job.failures) == len(deaths)
    for number, (kind, text) in enumerate(deaths):
        failure = job.failures[number]
        assert failure["kind"] == "process"
        assert failure["rank"] == 1
        assert failure["step"] == 10 + number
        assert failure["retryable"]
        assert text in failure["problem"]
        seconds = job.attempts[number]["ended_at"] - job.triggered_faults[number]["triggered_at"]
        figure(f"seconds to notice {kind}", seconds)
        assert text in job.stderr


@FULL
def test_an_exception_is_retried_once_and_then_ends_the_run(jobs: Jobs) -> None:
    job = jobs.create({"kind": "raise", "rank": 1, "step": 10, "attempt": 0})
    job.options = ("--traceback",)
    job.finish(64)
    assert "RuntimeError in regauge/supervision/faults/faults.py" in job.stderr.splitlines()[-1]
    assert "In process 1:\nTraceback (most recent call last):" in job.stderr
    assert 'raise RuntimeError("injected by the fault plan")' in job.stderr
    first, second = job.failures
    assert first["kind"] == second["kind"] == "user"
    assert first["rank"] == second["rank"] == 1
    assert "injected by the fault plan" in "\n".join(first["evidence"]["traceback"])
    assert len(job.triggered_faults) == 2
    jobs.assert_nothing_is_left(job)


@FULL
def test_a_single_exception_is_survived(jobs: Jobs) -> None:
    job = jobs.assert_survives(jobs.create({"kind": "raise", "rank": 0, "step": 10}))
    assert [failure["kind"] for failure in job.failures] == ["user"]


@pytest.mark.parametrize(
    ("kind", "rank"),
    [("stop", 1), pytest.param("block", 1, marks=FULL), pytest.param("stop", 0, marks=FULL)],
)
def test_a_process_that_hangs_is_named_and_the_run_continues(
    jobs: Jobs, kind: str, rank: int, figure: Callable[[str, float], None]
) -> None:
    job = jobs.assert_survives(jobs.create({"kind": kind, "rank": rank, "step": 10}))
    (failure,) = job.failures
    assert failure["kind"] == "hang"
    assert failure["rank"] == rank
    assert failure["step"] == 10
    assert "no heartbeat for" in failure["problem"]
    figure(
        f"seconds to notice {kind}",
        job.attempts[0]["ended_at"] - job.triggered_faults[0]["triggered_at"],
    )
    stack = failure["evidence"]["stacks"][str(1 - rank)]
    assert any("regauge/training/gradients.py" in line for line in stack)


@FULL
def test_a_collective_that_one_process_skips_is_reported(jobs: Jobs) -> None:
    """Gloo aborts at a message of another size, or the other process waits."""
    job = jobs.assert_survives(jobs.create({"kind": "skip-collective", "rank": 1, "step": 10}))
    (failure,) = job.failures
    if failure["kind"] == "process":
        assert any("in all_reduce" in line for line in failure["evidence"]["stack"])
    collectives = failure["evidence"]["collectives"][str(1 - failure["rank"])]
    assert collectives[-1]["profiling_name"] == "gloo:all_reduce"


@FULL
def test_a_process_that_waits_elsewhere_is_behind_in_its_collectives(jobs: Jobs) -> None:
    job = jobs.assert_survives(
        jobs.create({"kind": "sleep", "rank": 1, "step": 10, "seconds": 1000})
    )
    (failure,) = job.failures
    assert failure["kind"] == "hang"
    assert failure["rank"] == 1
    collectives: dict[str, Any] = failure["evidence"]["collectives"]
    assert collectives["0"][-1]["profiling_name"] == "gloo:all_reduce"
    assert collectives["0"][-1]["collective_seq_id"] > collectives["1"][-1]["collective_seq_id"]
    assert any("faults.py" in line for line in failure["evidence"]["stacks"]["1"])


@FULL
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_straggler_is_named_and_the_run_continues(jobs: Jobs, strategy: str) -> None:
    slow = {"kind": "sleep", "rank": 1, "step": 8, "count": 16, "seconds": 0.5}
    job = jobs.assert_survives(jobs.create(slow, strategy=strategy))
    assert "rank 1 is a straggler" in job.stderr_line
    assert len(job.attempts) == 1
    named = [line for line in read_lines(job.folder / "ledger.jsonl") if line["straggler"]]
    assert {line["straggler"]["rank"] for line in named} == {1}
    assert named[0]["step"] <= 12
    assert "straggler: process 1" in render_markdown(build_report((read_run_folder(job.folder),)))


@FULL
def test_a_fault_that_always_recurs_ends_the_run(jobs: Jobs) -> None:
    job = jobs.create({"kind": "kill", "rank": 1, "step": 10, "attempt": 0}).finish(66)
    assert "3 attempts failed at step 10 in the same way" in job.stderr.splitlines()[-1]
    assert len(job.failures) == len(job.triggered_faults) == 3
    jobs.assert_nothing_is_left(job)
