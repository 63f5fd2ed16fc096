"""Overhead and transfers of a training step on XLA, compared with a minimal torch_xla loop.

One process alternates between `regauge train` and a minimal loop, as in `overhead.py`. The minimal
loop sends its batches, marks a step after each microbatch and after the optimizer, and has a
constant learning rate. Both compute the same model in fp32.

    <environment with torch_xla>/bin/python benchmarks/xla_steps.py [--alternations 10] [--steps 4]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch_xla
from overhead import MODEL, Alternating, compare_loops
from recording import RESULTS, write_result
from text import prepare_library_docs

from regauge.accelerators import ChipPeak
from regauge.config import build
from regauge.monitoring.trackers import RunInfo, start_trackers
from regauge.system import processes
from regauge.training.compile.warmup import finalize_state, warm_up
from regauge.training.defaults import resolve_defaults
from regauge.training.run_setup import Run, set_up
from regauge.training.settings import TrainSettings
from regauge.training.trainer import train

ROWS, MICROBATCH_ROWS = 16, 8
BARE_WARMUP_STEPS = 3
PER_STEP_COUNTERS = (
    "transfers_to_device",
    "bytes_to_device",
    "transfers_from_device",
    "compiled_graphs",
    "cpu_fallbacks",
)
"""Counters of the device that are reported per step."""


def main() -> None:
    """Print and write the overhead, and the transfers of each loop per step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--alternations", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, default=RESULTS / "xla_steps.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        chip, figures = measure(Path(scratch), arguments.alternations, arguments.steps)
    benchmark = "a step on XLA over a minimal torch_xla loop"
    write_result(arguments.json, benchmark, chip, figures, "torch_xla")


def measure(scratch: Path, alternations: int, steps: int) -> tuple[ChipPeak, dict[str, object]]:
    """Return the chip, and the figures of a run that alternates between the two loops."""
    tables = {
        "output": {"folder": str(scratch / "run"), "trackers": (), "log_every_steps": steps},
        "data": {"path": str(prepare_library_docs(scratch / "data"))},
        "task": "mlm",
        "model": {**MODEL, "dropout": 0.1},
        "accelerator": "xla",
        "execution": {"precision": "fp32"},
        "batch": {"rows": ROWS, "microbatch_rows": MICROBATCH_ROWS},
        "stop": {"steps": (alternations + 1) * steps},
        "evaluation": {"rows": 2},
    }
    world = processes.World()
    settings = resolve_defaults(build(TrainSettings, tables), world)
    run = set_up(settings, world)
    run.context.folder.mkdir()
    warm_up(*run, run.context.shapes)
    finalize_state(*run)
    do_step = build_bare_step(run)
    for _ in range(BARE_WARMUP_STEPS):
        do_step()
    counters: dict[str, list[dict[str, float]]] = {"regauge": [], "bare": []}
    before = run.context.accelerator.counters()

    def time_bare_steps() -> float:
        between = run.context.accelerator.counters()
        began = time.perf_counter()
        for _ in range(steps):
            do_step()
        run.context.accelerator.synchronize()
        seconds = time.perf_counter() - began
        after = run.context.accelerator.counters()
        counters["regauge"].append({name: between[name] - before[name] for name in between})
        counters["bare"].append({name: after[name] - between[name] for name in after})
        before.update(after)
        return seconds

    tracker = Alternating()
    tracker._other = time_bare_steps  # noqa: SLF001 - the tracker of this benchmark
    facts = RunInfo(name="xla", run_id="xla", folder=run.context.folder)
    with start_trackers((tracker,), facts) as trackers:
        trackers.log(0, {})
        train(*run, trackers)
    return (
        run.context.mfu.chip,
        {
            **compare_loops(tracker._pairs[1:], steps),  # noqa: SLF001 - the tracker of this benchmark
            "per_step": {
                loop: {
                    name: statistics.median(chunk[name] for chunk in chunks[1:]) / steps
                    for name in PER_STEP_COUNTERS
                }
                for loop, chunks in counters.items()
            },
        },
    )


def build_bare_step(run: Run) -> Callable[[], None]:
    """Return a function that does one hand-written step."""
    settings, task = run.context.settings, run.context.task_at(run.state.step).task
    module = task.build_module(
        settings.model, run.context.task_at(run.state.step).manifest, settings.seed
    )
    module.train().to(run.context.device)
    module.model.tie_weights()
    weights = list(module.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-4, betas=(0.9, 0.98), capturable=True)
    arrays = run.context.read_batches(0)
    host = [{name: torch.from_numpy(value) for name, value in part.items()} for part in arrays]

    def do_step() -> None:
        counts = []
        for part in host:
            batch = {name: value.to(run.context.device) for name, value in part.items()}
            loss, count = task.loss(module(batch), batch)
            loss.backward()
            counts.append(count)
            torch_xla.sync()
        factor = 1 / sum(counts)
        for weight in weights:
            weight.grad.mul_(factor)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()

    return do_step


if __name__ == "__main__":
    main()
