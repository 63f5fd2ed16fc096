"""The goodput of a run, from the files that its attempts wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from regauge.run_folders.goodput import read_goodput
from regauge.system import jsonl


def write_run(folder: Path) -> None:
    for number, began, ended, end in ((1, 100.0, 110.0, "process"), (2, 112.0, 130.0, "finished")):
        jsonl.append_line(folder / "attempts.jsonl", {"attempt": number, "started_at": began})
        line = {"attempt": number, "started_at": began, "ended_at": ended, "outcome": end}
        jsonl.append_line(folder / "attempts.jsonl", line)
    seconds = {"init": 6.0, "step": 15.0, "evaluate": 3.0, "lost": 1.5}
    jsonl.append_line(folder / "ledger.jsonl", {"attempt": 2, "step": 9, "seconds": seconds})


def test_seconds_that_no_process_booked_are_idle(tmp_path: Path) -> None:
    write_run(tmp_path)
    goodput = read_goodput(tmp_path)
    assert goodput
    assert goodput.total_seconds == pytest.approx(30.0)
    assert goodput.seconds["idle"] == pytest.approx(4.5)
    assert goodput.fraction == pytest.approx(18 / 30)
    assert goodput.outcomes == {1: "process", 2: "finished"}


def test_an_attempt_in_progress_has_no_end(tmp_path: Path) -> None:
    write_run(tmp_path)
    jsonl.append_line(tmp_path / "attempts.jsonl", {"attempt": 3, "started_at": 140.0})
    goodput = read_goodput(tmp_path)
    assert goodput
    assert 3 not in goodput.outcomes


def test_a_run_without_a_supervisor_has_no_goodput(tmp_path: Path) -> None:
    line = {"attempt": 1, "step": 1, "seconds": {"step": 1.0}}
    jsonl.append_line(tmp_path / "ledger.jsonl", line)
    assert read_goodput(tmp_path) is None
