"""The steps of `make gpu` on a CPU: their results, a resume, and steps that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from regauge.system import timing
from regauge.system.processes import inspect_process, restore_environment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FACTS = {"sources": "a", "chip": "b", "small": True}
Measure = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(name="measure")
def step_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Return a function that runs programs as steps; it returns the exit code and the results."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    with restore_environment():  # libraries of the peers set variables
        run_steps = import_module("gpu").run_steps

    def measure(programs: dict[str, str], limit: float = 60, **options: Any) -> Any:
        commands = {name: [sys.executable, "-c", text] for name, text in programs.items()}
        path = tmp_path / "results" / "gpu.json"
        facts = FACTS | options.pop("facts", {})
        code = run_steps(commands, path, facts, limit, **options)
        return code, json.loads(path.read_text())["steps"]

    return measure


def write(document: str) -> str:
    return f"import sys; open(sys.argv[1], 'w').write('{document}')"


def test_a_failed_step_is_recorded_and_the_next_one_runs(measure: Measure) -> None:
    good, missing = write('{"figures": {"speed": 1}}'), write('{"reason": "no CUDA"}')
    crash = "import os; os.kill(os.getpid(), 11)"
    steps = {"bad": "raise SystemExit('no memory')", "crash": crash, "missing": missing}
    code, results = measure({**steps, "good": good})
    assert code == 1
    assert results["bad"]["last_lines"] == ["no memory"]
    assert results["crash"]["reason"] == "killed by signal 11"
    assert (results["missing"]["status"], results["missing"]["reason"]) == (
        "not measured",
        "no CUDA",
    )
    assert (results["good"]["status"], results["good"]["figures"]) == ("measured", {"speed": 1})
    assert results["good"]["chip"] == "b"
    assert measure({"missing": missing, "good": good})[0] == 0


def test_a_step_is_measured_again_for_other_sources_or_on_request(measure: Measure) -> None:
    measure({"step": write('{"figures": {"speed": 1}}')})
    faster = {"step": write('{"figures": {"speed": 2}}')}
    assert measure(faster)[1]["step"]["figures"]["speed"] == 1
    assert measure(faster, again=["step"])[1]["step"]["figures"]["speed"] == 2
    other = {"step": write('{"figures": {"speed": 3}}')}
    assert measure(other, facts={"sources": "c"})[1]["step"]["figures"]["speed"] == 3


def test_the_children_of_a_step_end_at_its_limit(measure: Measure) -> None:
    child = "[sys.executable, '-c', 'import time; time.sleep(99)']"
    text = (
        f"import subprocess, sys; p = subprocess.Popen({child}); print(p.pid, flush=True); p.wait()"
    )
    code, results = measure({"slow": text}, limit=2)
    assert (code, results["slow"]["reason"]) == (1, "not finished after 2 s")
    [pid] = results["slow"]["last_lines"]
    assert timing.wait_for(
        lambda: inspect_process(int(pid)).state in {"", "Z"}, 10, poll_seconds=0.01
    )


@pytest.mark.full
def test_the_small_steps_run_on_a_cpu_and_are_skipped_afterwards(tmp_path: Path) -> None:
    steps = ["attention", "fp8", "bert-profile"]
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--small", *steps]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    path = tmp_path / "out" / "gpu" / "small.json"
    results = json.loads(path.read_text())["steps"]
    assert results["attention"]["figures"]["tiny"]["flash"]["ms"] > 0
    assert "fp8" in results["fp8"]["reason"]
    figures = results["bert-profile"]["figures"]
    assert figures["tokens_per_second"] > 0
    assert sum(figures["profile"]["shares"].values()) == pytest.approx(1, abs=0.01)
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "attention: measured before" in done.stderr
    again = json.loads(path.read_text())["steps"]
    assert again["bert-profile"] == results["bert-profile"]
