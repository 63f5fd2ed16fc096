"""What saving costs a run that nothing hits: its goodput from the end of the first step.

`regauge train`, supervised as users start it, for a number of minutes with a save in each. How many
steps that is, a short run of the same settings says first. Seconds from the end of the first step
to the end of the last process count; of use are those of steps and evaluations. What comes before
is reported apart.

    python benchmarks/goodput.py [--minutes 10] [--processes 1] [--json OUT]
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from overhead import MODEL
from recording import RESULTS, keep, train_command
from text import corpus

from regauge import jsonl
from regauge.accelerators.cpu import Cpu
from regauge.supervision.goodput import PRODUCTIVE, read_goodput

LIMIT = 0.99
TRIAL_STEPS = 30
ROWS, MICROBATCH_ROWS = 32, 16


def main() -> None:
    """Measure and keep the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS / "goodput.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        data = corpus(root / "data")
        trial = root / "trial"
        _train(trial, data, arguments.processes, TRIAL_STEPS, TRIAL_STEPS)
        each = _seconds_of_a_step(trial)
        steps = round(60 * arguments.minutes / each)
        folder = root / "run"
        _train(folder, data, arguments.processes, steps, round(60 / each))
        figures = measured(folder)
    keep(
        arguments.json,
        "goodput of a run without a fault, with a save each minute",
        Cpu().chip_peak("fp32"),
        {"limit": LIMIT, "processes": arguments.processes, "steps": steps, **figures},
    )


def measured(folder: Path) -> dict[str, Any]:
    """Return what a run's ledger says of the time before and after the end of its first step."""
    first = jsonl.read_lines(folder / "ledger.jsonl")[0]
    found = read_goodput(folder)
    if found is None or first["step"] != 1:
        raise SystemExit(f"{folder} does not say where its time went")
    before = first["seconds"]
    after = {name: found.seconds[name] - before.get(name, 0.0) for name in found.seconds}
    total = sum(after.values())
    return {
        "goodput_from_the_end_of_step_1": sum(after[name] for name in PRODUCTIVE) / total,
        "goodput_of_all": found.share,
        "seconds_before": sum(before.values()),
        "seconds_after": total,
        "seconds_after_by_account": after,
    }


def _seconds_of_a_step(folder: Path) -> float:
    told = jsonl.read_lines(folder / "ledger.jsonl")
    first, last = told[len(told) // 3], told[-1]
    steps = last["step"] - first["step"]
    return float(last["seconds"]["step"] - first["seconds"]["step"]) / steps


def _train(folder: Path, data: Path, processes: int, steps: int, save_every: int) -> None:
    command = train_command(
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
