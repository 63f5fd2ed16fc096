"""Goodput of a run without faults, from the end of its first step: the cost of checkpoints.

`regauge train` runs for some minutes under its supervisor, with a checkpoint each minute. A short
trial run with the same settings measures the number of steps for that. Seconds count from the end
of the first step to the end of the last process; steps and evaluations are productive. The seconds
before are reported separately.

    python benchmarks/goodput.py [--minutes 10] [--processes 1] [--json OUT]
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from overhead import MODEL
from recording import RESULTS, write_result, write_train_command
from text import prepare_library_docs

from regauge.accelerators.cpu import Cpu
from regauge.run_folders.goodput import PRODUCTIVE, read_goodput
from regauge.system import jsonl

LIMIT = 0.99
TRIAL_STEPS = 30
ROWS, MICROBATCH_ROWS = 32, 16


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS / "goodput.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        data = prepare_library_docs(root / "data")
        trial = root / "trial"
        _train(trial, data, arguments.processes, TRIAL_STEPS, TRIAL_STEPS)
        step_seconds = _read_step_seconds(trial)
        steps = round(60 * arguments.minutes / step_seconds)
        folder = root / "run"
        _train(folder, data, arguments.processes, steps, round(60 / step_seconds))
        figures = read_figures(folder)
    write_result(
        arguments.json,
        "goodput of a run without a fault, with a save each minute",
        Cpu().chip_peak("fp32"),
        {"limit": LIMIT, "processes": arguments.processes, "steps": steps, **figures},
    )


def read_figures(folder: Path) -> dict[str, Any]:
    """Return the seconds of a run's ledger before and after the end of its first step."""
    first = jsonl.read_lines(folder / "ledger.jsonl")[0]
    goodput = read_goodput(folder)
    if goodput is None or first["step"] != 1:
        raise SystemExit(f"{folder} has no ledger from its first step on")
    before = first["seconds"]
    after = {name: goodput.seconds[name] - before.get(name, 0.0) for name in goodput.seconds}
    total = sum(after.values())
    return {
        "goodput_after_step_1": sum(after[name] for name in PRODUCTIVE) / total,
        "goodput": goodput.fraction,
        "seconds_until_step_1": sum(before.values()),
        "seconds_after_step_1": total,
        "seconds_after_step_1_by_account": after,
    }


def _read_step_seconds(folder: Path) -> float:
    lines = jsonl.read_lines(folder / "ledger.jsonl")
    first, last = lines[len(lines) // 3], lines[-1]
    steps = last["step"] - first["step"]
    return float(last["seconds"]["step"] - first["seconds"]["step"]) / steps


def _train(folder: Path, data: Path, processes: int, steps: int, save_every: int) -> None:
    command = write_train_command(
        folder,
        data,
        save_every,
        model=MODEL,
        batch={"rows": ROWS, "microbatch_rows": MICROBATCH_ROWS},
        execution={"processes": processes},
        stop={"steps": steps},
        evaluation={"rows": 64},
    )
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
