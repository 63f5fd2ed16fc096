"""The file of the user's measured runs, step times of ledgers, and numbers of plans as text."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from regauge.commands._plan_text import format_number
from regauge.machines.machine_rates import MachineRates
from regauge.planner import run_history
from regauge.planner.anchors import Anchor, Features
from regauge.planner.run_history import MAX_RUNS, find_local_machine, load_history, record_run
from regauge.planner.run_plans.run_recorder import median_step
from regauge.system.errors import SettingsError

FEATURES = Features("cpu", "", "none", "single 1.1.1", 1, 64, 32, 64, 1, 1, precision="fp32")
MACHINE = MachineRates("local", "cpu", 1, 1e11, 8e9, 2e10, 2e10, 0.0, is_shared=True)
RUN = Anchor("a", FEATURES, "test", 2.0, 1.0, run_id="0", machine=MACHINE)


def test_the_history_is_bounded_and_has_each_run_once(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "runs.jsonl"
    for number in range(MAX_RUNS + 3):
        record_run(dataclasses.replace(RUN, run_id=str(number)), path)
    record_run(dataclasses.replace(RUN, run_id="7", measured_seconds=9.0), path)
    runs = load_history(path)
    assert len(runs) == MAX_RUNS
    assert [run.run_id for run in runs[:3]] == ["3", "4", "5"]
    assert runs[-1].run_id == "7"
    assert runs[-1].measured_seconds == 9.0
    assert runs[0].machine == MACHINE


def test_the_variable_names_the_file_or_turns_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(run_history.VARIABLE, str(tmp_path / "mine.jsonl"))
    assert run_history.find_history() == tmp_path / "mine.jsonl"
    monkeypatch.setenv(run_history.VARIABLE, "off")
    assert run_history.find_history() is None
    record_run(RUN)
    assert load_history() == ()


def test_runs_of_another_version_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "runs.jsonl"
    record_run(RUN, path)
    document = json.loads(path.read_text())
    formula = document.pop("formula")
    with path.open("a") as file:
        for changes in ({}, {"formula": formula - 1}, {"formula": formula, "features": {"a": 1}}):
            file.write(json.dumps(document | changes) + "\n")
    assert load_history(path) == (RUN,)
    assert "3 runs of another version" in caplog.text
    record_run(RUN, path)
    assert len(path.read_text().splitlines()) == 1


def test_processes_share_a_processor() -> None:
    """Two processes of a processor have half of its peak each; a missing run is an error."""
    machine = find_local_machine([RUN], 2, "fp32")
    assert (machine.devices, machine.peak_flops, machine.memory_bytes) == (2, 5e10, 4e9)
    with pytest.raises(SettingsError, match="no run was measured on this machine"):
        find_local_machine([dataclasses.replace(RUN, machine=None)], 1, "fp32")


def test_a_local_machine_prefers_the_precision() -> None:
    features = dataclasses.replace(FEATURES, precision="autocast")
    other = dataclasses.replace(
        RUN, features=features, machine=dataclasses.replace(MACHINE, peak_flops=5e11)
    )
    assert find_local_machine([RUN, other], 1, "fp32").peak_flops == 1e11
    assert find_local_machine([RUN, other], 1, "autocast").peak_flops == 5e11


def build_line(attempt: int, step: int, seconds: float) -> dict[str, Any]:
    """Return a line of a ledger whose training took some seconds so far."""
    return {"attempt": attempt, "step": step, "seconds": {"step": seconds - 1, "data_wait": 1.0}}


def test_the_step_time_is_the_median_of_warm_intervals() -> None:
    """The first interval of each attempt warms up; a restart and equal steps do not count."""
    lines = [build_line(1, step, seconds) for step, seconds in ((10, 90), (20, 100), (30, 112))]
    assert median_step(lines) == pytest.approx(1.1)
    lines += [build_line(2, 20, 300), build_line(2, 20, 310), build_line(2, 30, 500)]
    assert median_step([*lines, build_line(2, 40, 513)]) == pytest.approx(1.2)
    assert median_step(lines[:2]) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234567.0, "1,230,000"),
        (999.6, "1,000"),
        (87.83, "87.8"),
        (9.744, "9.74"),
        (4.0, "4"),
        (10.0, "10"),
        (0.0522, "0.0522"),
        (2.5e-7, "2.5e-07"),
        (0.0, "0"),
        (None, "unknown"),
        (-12.345, "-12.3"),
    ],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert format_number(value) == text
