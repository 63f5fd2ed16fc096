"""How long training stands still for a save, beside torch.save, and how fast one is loaded again.

A BERT (8 layers of 512, 16,384 words) with its fp32 masters and both moments, on this disk. In
turns: a save while training goes on, whose writing may slow the steps beside it down, and
torch.save of the same tensors. What is loaded was written a moment ago and lies in the page cache;
every file is hashed and compared with its manifest before.

    python benchmarks/checkpoint.py [--text FILE] [--turns N] [--json OUT]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from language import run as run_tables
from peers import arguments
from recording import keep, spread
from train_mlm import LANGUAGE

from regauge import processes
from regauge.accelerators.cpu import Cpu
from regauge.config import build
from regauge.training import optimizer as optimizers
from regauge.training.checkpointing import restore, save_checkpoint
from regauge.training.defaults import resolve_defaults
from regauge.training.optimizer_step import optimizer_step
from regauge.training.run_setup import Run, set_up
from regauge.training.settings import TrainSettings

LENGTH, ROWS = 128, 4
"""Steps are short, so that many of them meet the writing."""
QUIET_STEPS = 8
MOST_STALL, LEAST_BYTES_PER_SECOND = 0.1, 1e9
STALL = "seconds in which the loop stands still / seconds of torch.save"


def main() -> None:
    """Measure, and write what was found."""
    parser = arguments(__doc__, "checkpoint", turns=7, steps=QUIET_STEPS)
    own = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = opened(Path(scratch), own)
        turns = [turn(run, own.steps) for _ in range(own.turns + 1)][1:]
        loads = [loaded(run) for _ in range(own.turns)]
    keep(own.json, "saves and loads", Cpu().chip_peak("fp32"), figures(run, turns, loads))


def opened(scratch: Path, own: Any) -> Run:
    """Return a run whose optimizer has its moments, and that has done a step."""
    tables = run_tables(own, LANGUAGE.sized(own), LENGTH, scratch / "data")
    tables["stop"] = {"steps": 10**6}
    tables["output"] = {"folder": str(scratch / "run"), "trackers": ()}
    tables["execution"] = {"compile": "off"}
    tables["batch"] = {"rows": ROWS, "microbatch_rows": ROWS}
    world = processes.World()
    run = set_up(resolve_defaults(build(TrainSettings, tables), world), world)
    run.context.folder.mkdir()
    optimizers.prime_state(run.state.optimizer)
    step(run)
    return run


def step(run: Run) -> float:
    """Do a step, and return its seconds."""
    arrays = run.context.read_batches(run.state.step)
    batches = [{name: torch.from_numpy(value) for name, value in part.items()} for part in arrays]
    began = time.perf_counter()
    optimizer_step(*run, batches)
    run.state.step += 1
    return time.perf_counter() - began


def turn(run: Run, steps: int) -> dict[str, float]:
    """Return the seconds of a save beside steps, of their slowing down, and of torch.save."""
    quiet = statistics.median(step(run) for _ in range(steps))
    began = time.perf_counter()
    save_checkpoint(*run, {})
    stall = time.perf_counter() - began
    beside = []
    path = run.context.folder / "checkpoints" / f"step-{run.state.step:08d}" / "manifest.json"
    while not path.exists():
        beside.append(step(run))
    written = time.perf_counter() - began
    run.context.saver.wait()
    return {
        "stall": stall,
        "slowed": sum(beside) - len(beside) * quiet,
        "written": written,
        **plainly(run),
    }


def plainly(run: Run) -> dict[str, float]:
    """Return the seconds of torch.save, and of the flush to the disk behind it."""
    path = run.context.folder / "plain.pt"
    began = time.perf_counter()
    torch.save(run.state.tensors(), path)
    saved = time.perf_counter()
    with path.open("rb") as file:
        os.fsync(file.fileno())
    flushed = time.perf_counter()
    path.unlink()
    return {"torch_save": saved - began, "flush": flushed - saved}


def loaded(run: Run) -> dict[str, float]:
    """Return the seconds to find and verify the newest checkpoint, and to load it."""
    began = time.perf_counter()
    path = run.context.saver.find_newest()
    verified = time.perf_counter()
    if path is None:
        raise SystemExit("nothing was saved")
    restore(*run, path)
    return {"verify": verified - began, "load": time.perf_counter() - verified}


def figures(
    run: Run, turns: list[dict[str, float]], loads: list[dict[str, float]]
) -> dict[str, Any]:
    """Return medians with their spread, and what was to be reached."""
    size = sum(value.nbytes for value in run.state.tensors().values())
    stalls = [each["stall"] / each["torch_save"] for each in turns]
    rates = [size / (each["verify"] + each["load"]) for each in loads]
    share, rate = statistics.median(stalls), statistics.median(rates)
    return {
        "bytes": size,
        "turns": len(turns),
        "seconds": {
            name: spread([each[name] for each in told])
            for told in (turns, loads)
            for name in told[0]
        },
        "stall": {"formula": STALL, **spread(stalls), "limit": MOST_STALL},
        "stall_met": share <= MOST_STALL,
        "bytes_per_second": {**spread(rates), "goal": LEAST_BYTES_PER_SECOND},
        "load_met": rate >= LEAST_BYTES_PER_SECOND,
    }


if __name__ == "__main__":
    main()
