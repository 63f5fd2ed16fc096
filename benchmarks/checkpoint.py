"""Training stall and load rate of checkpoints, compared with torch.save.

The state is a BERT (8 layers of width 512, 16,384 tokens in the vocabulary), its fp32 masters and
both moments. Two saves alternate: a save during training, which may slow concurrent steps, and
torch.save of the same tensors. Loads read from the page cache; every file is first hashed and
compared with its manifest.

    python benchmarks/checkpoint.py [--text FILE] [--repeats N] [--json OUT]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from language import prepare_run
from peers import build_parser
from recording import summarize, write_result
from train_mlm import LANGUAGE

from regauge.accelerators.cpu import Cpu
from regauge.config import build
from regauge.system import processes
from regauge.training.checkpointing import restore, save_checkpoint
from regauge.training.defaults import resolve_defaults
from regauge.training.optimizer import optimizer_step, prime_state
from regauge.training.run_setup import Run, set_up
from regauge.training.settings import TrainSettings

LENGTH, ROWS = 128, 4
"""Short steps, so that many of them run during a write."""
QUIET_STEPS = 8
MAX_STALL, MIN_BYTES_PER_SECOND = 0.1, 1e9
STALL_FORMULA = "seconds that a save blocks the loop / seconds of torch.save"


def main() -> None:
    """Measure, and write the results."""
    parser = build_parser(__doc__, "checkpoint", repeats=7, steps=QUIET_STEPS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = start_run(Path(scratch), options)
        saves = [time_save(run, options.steps) for _ in range(options.repeats + 1)][1:]
        loads = [time_load(run) for _ in range(options.repeats)]
    figures = build_figures(run, saves, loads)
    write_result(options.json, "saves and loads", Cpu().chip_peak("fp32"), figures)


def start_run(scratch: Path, options: Any) -> Run:
    """Return a run with the moments of its optimizer, after its first step."""
    tables = prepare_run(options, LANGUAGE.resize(options), LENGTH, scratch / "data")
    tables["stop"] = {"steps": 10**6}
    tables["output"] = {"folder": str(scratch / "run"), "trackers": ()}
    tables["execution"] = {"compile": "off"}
    tables["batch"] = {"rows": ROWS, "microbatch_rows": ROWS}
    world = processes.World()
    run = set_up(resolve_defaults(build(TrainSettings, tables), world), world)
    run.context.folder.mkdir()
    prime_state(run.state.optimizer)
    time_step(run)
    return run


def time_step(run: Run) -> float:
    """Do a step, and return its seconds."""
    arrays = run.context.read_batches(run.state.step)
    batches = [{name: torch.from_numpy(value) for name, value in part.items()} for part in arrays]
    began = time.perf_counter()
    optimizer_step(*run, batches)
    run.state.step += 1
    return time.perf_counter() - began


def time_save(run: Run, steps: int) -> dict[str, float]:
    """Return the seconds of a save during steps, of their slowdown, and of torch.save."""
    quiet = statistics.median(time_step(run) for _ in range(steps))
    began = time.perf_counter()
    save_checkpoint(*run, {})
    stall = time.perf_counter() - began
    concurrent = []
    path = run.context.folder / "checkpoints" / f"step-{run.state.step:08d}" / "manifest.json"
    while not path.exists():
        concurrent.append(time_step(run))
    written = time.perf_counter() - began
    run.context.saver.wait()
    return {
        "stall": stall,
        "slowdown": sum(concurrent) - len(concurrent) * quiet,
        "write": written,
        **time_torch_save(run),
    }


def time_torch_save(run: Run) -> dict[str, float]:
    """Return the seconds of torch.save, and of the flush to the disk after it."""
    path = run.context.folder / "plain.pt"
    began = time.perf_counter()
    torch.save(run.state.tensors(), path)
    saved = time.perf_counter()
    with path.open("rb") as file:
        os.fsync(file.fileno())
    flushed = time.perf_counter()
    path.unlink()
    return {"torch_save": saved - began, "flush": flushed - saved}


def time_load(run: Run) -> dict[str, float]:
    """Return the seconds to find and verify the newest checkpoint, and to load it."""
    began = time.perf_counter()
    path = run.context.saver.find_newest()
    verified = time.perf_counter()
    if path is None:
        raise SystemExit("nothing was saved")
    restore(*run, path)
    return {"verify": verified - began, "load": time.perf_counter() - verified}


def build_figures(
    run: Run, saves: list[dict[str, float]], loads: list[dict[str, float]]
) -> dict[str, Any]:
    """Return medians with their ranges, and whether the goals are reached."""
    size = sum(value.nbytes for value in run.state.tensors().values())
    stalls = [save["stall"] / save["torch_save"] for save in saves]
    rates = [size / (load["verify"] + load["load"]) for load in loads]
    share, rate = statistics.median(stalls), statistics.median(rates)
    return {
        "bytes": size,
        "repeats": len(saves),
        "seconds": {
            name: summarize([repeat[name] for repeat in repeats])
            for repeats in (saves, loads)
            for name in repeats[0]
        },
        "stall": {"formula": STALL_FORMULA, **summarize(stalls), "limit": MAX_STALL},
        "stall_met": share <= MAX_STALL,
        "bytes_per_second": {**summarize(rates), "goal": MIN_BYTES_PER_SECOND},
        "load_met": rate >= MIN_BYTES_PER_SECOND,
    }


if __name__ == "__main__":
    main()
