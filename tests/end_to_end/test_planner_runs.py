"""Runs that correct the plans after them: the record of a finished run, and a probe."""

from __future__ import annotations

import json
import statistics
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from distributed import datasets
from distributed.runs import settings
from regauge.cli import main
from regauge.config import dump, merge
from regauge.planner import run_history
from regauge.planner.run_plans import local_probe
from regauge.system import jsonl


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_packed(tmp_path_factory.mktemp("data") / "packed")


def write_run(folder: Path, data: Path, steps: int = 10) -> Path:
    """Write the run file of a tiny run, which logs every second step; return its path."""
    changes: dict[str, Any] = {
        "stop": {"steps": steps},
        "output": {"log_every_steps": 2},
        "execution": {"compile": "off", "price": {"usd_per_hour": 3.6}},
    }
    path = folder / "run.json"
    path.write_text(json.dumps(merge(dump(settings(folder / "out", data, "mlm")), changes)))
    return path


@pytest.mark.full
def test_a_finished_run_corrects_the_next_plan(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    history = tmp_path / "runs.jsonl"
    monkeypatch.setenv(run_history.VARIABLE, str(history))
    run_file = write_run(tmp_path, data)
    assert main(["train", str(run_file)]) == 0
    (run,) = run_history.load_history()
    ledger = [line for line in jsonl.read_lines(tmp_path / "out" / "ledger.jsonl") if line["step"]]
    seconds = [line["seconds"]["step"] + line["seconds"]["data_wait"] for line in ledger]
    steps = [after["step"] - before["step"] for before, after in pairwise(ledger)]
    rates = [
        (after - before) / number
        for (before, after), number in zip(pairwise(seconds), steps, strict=True)
        if number
    ]
    assert run.measured_seconds == pytest.approx(statistics.median(rates))
    assert run.measured_bytes == max(line["memory_bytes"]["peak"] for line in ledger)
    assert run.planned_seconds
    capsys.readouterr()
    assert main(["plan", str(run_file), "--on", "local", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["nearest"][0]["is_own"]
    assert answer["nearest"][0]["distance"] == 0
    assert answer["step_seconds"]["p50"] == pytest.approx(run.measured_seconds, rel=0.1)
    assert answer["own_runs"] == 1
    error = 100 * (run.planned_seconds / run.measured_seconds - 1)
    assert answer["own_mean_error_percent"] == pytest.approx(abs(error), abs=0.1)


@pytest.mark.full
@pytest.mark.parametrize("target", ["off", "folder"])
def test_a_run_is_not_affected_by_its_record(
    target: str, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`off` writes nothing, and a path that cannot be written is no failure of the run."""
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.setenv(run_history.VARIABLE, "off" if target == "off" else str(tmp_path))
    assert main(["train", str(write_run(tmp_path, data))]) == 0
    assert not state.exists()


@pytest.mark.full
def test_a_probe_plans_the_run_on_this_machine(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(run_history.VARIABLE, str(tmp_path / "runs.jsonl"))
    run_file = write_run(tmp_path, data, steps=1000)
    assert main(["plan", str(run_file), "--probe", "execution.processes=2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    probes = run_history.load_history()
    assert [run.features.devices for run in probes] == [1, 2]
    assert [row["processes"] for row in answer["scaling"]] == [1, 2]
    for row, run in zip(answer["scaling"], probes, strict=True):
        assert row["step_seconds"] == pytest.approx(run.measured_seconds, rel=0.25)
    assert answer["usd"]["p50"] == pytest.approx(3.6 * answer["hours"]["p50"], rel=0.01)
    assert "own_runs" not in answer, "a probe was not planned, so it has no error"
    assert not (tmp_path / "out").exists()


def test_a_probe_needs_prepared_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = write_run(tmp_path, tmp_path / "missing")
    assert main(["plan", str(run_file), "--probe", "model.config.vocab_size=99"]) == 2
    assert "is not prepared; run 'regauge prepare'" in capsys.readouterr().err
    arguments = ["plan", str(run_file), "--probe", "--on", "p5.48xlarge"]
    assert main([*arguments, "model.config.vocab_size=99"]) == 2
    assert "--probe measures this machine" in capsys.readouterr().err


def test_a_refused_probe_prints_the_line_of_the_run(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(run_history.VARIABLE, str(tmp_path / "runs.jsonl"))
    run_file = write_run(tmp_path, data)
    overrides = ["batch.rows=8", "batch.microbatch_rows=8", "execution.processes=2"]
    assert main(["plan", str(run_file), "--probe", *overrides]) == 2
    printed = capsys.readouterr().err
    assert "measuring 20 steps on 2 processes" in printed
    assert "on 1 process" not in printed, "the number that may be refused is measured first"
    (line,) = (line for line in printed.splitlines() if line.startswith("regauge: "))
    assert line.startswith("regauge: 2 processes, but only 1 microbatch per step; use at most 1")
    assert not run_history.load_history()


def test_a_failed_probe_logs_its_lines(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder with the logs of the probe is removed, so the error does not name it."""

    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        folder = Path(command[-2]).parent
        assert folder.is_dir()
        error = f"out of memory\nregauge: process 0 ended; see {folder / 'run' / 'failures'}\n"
        return subprocess.CompletedProcess(command, 69, "", error)

    monkeypatch.setattr(local_probe, "run_tool", fail)
    assert main(["plan", str(write_run(tmp_path, data)), "--probe"]) == 69
    *lines, last = capsys.readouterr().err.splitlines()
    assert "out of memory" in lines
    assert last == "regauge: process 0 ended; see the lines above"
