"""Where the time of a run went, read from what its attempts wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from regauge import jsonl
from regauge.supervision.goodput import goodput


def run(folder: Path) -> None:
    for number, began, ended, end in ((1, 100.0, 110.0, "process"), (2, 112.0, 130.0, "finished")):
        jsonl.append(folder / "attempts.jsonl", {"attempt": number, "began": began})
        told = {"attempt": number, "began": began, "ended": ended, "end": end}
        jsonl.append(folder / "attempts.jsonl", told)
    seconds = {"init": 6.0, "step": 15.0, "evaluate": 3.0, "lost": 1.5}
    jsonl.append(folder / "ledger.jsonl", {"attempt": 2, "step": 9, "seconds": seconds})


def test_seconds_that_nobody_booked_are_idle(tmp_path: Path) -> None:
    run(tmp_path)
    found = goodput(tmp_path)
    assert found
    assert found.total_seconds == pytest.approx(30.0)
    assert found.seconds["idle"] == pytest.approx(4.5)
    assert found.share == pytest.approx(18 / 30)
    assert found.ends == {1: "process", 2: "finished"}


def test_an_attempt_that_goes_on_has_no_end(tmp_path: Path) -> None:
    run(tmp_path)
    jsonl.append(tmp_path / "attempts.jsonl", {"attempt": 3, "began": 140.0})
    found = goodput(tmp_path)
    assert found
    assert 3 not in found.ends


def test_a_run_without_a_supervisor_has_none(tmp_path: Path) -> None:
    jsonl.append(tmp_path / "ledger.jsonl", {"attempt": 1, "step": 1, "seconds": {"step": 1.0}})
    assert goodput(tmp_path) is None
