"""The step on XLA against a minimal hand-written torch_xla loop: seconds, and transfers.

One process alternates between the two, as `overhead.py` does: chunks of steps of `regauge train`,
and chunks of a loop that sends its batches, marks after each microbatch and after the optimizer,
and keeps its learning rate. Both compute the same model in fp32.

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
from overhead import MODEL, Alternating, comparison
from recording import RESULTS, keep
from text import corpus

from regauge import processes
from regauge.accelerators import ChipPeak
from regauge.config import build
from regauge.trackers import RunInfo, start_trackers
from regauge.training.compile.warmup import finalize_state, warm_up
from regauge.training.defaults import resolve_defaults
from regauge.training.run_setup import Run, set_up
from regauge.training.settings import TrainSettings
from regauge.training.trainer import train

ROWS, MICROBATCH_ROWS = 16, 8
BARE_WARM_UP = 3


def main() -> None:
    """Print and write the ratio of the two loops, and what each sends and reads in a step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--alternations", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, default=RESULTS / "xla_steps.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        chip, figures = measured(Path(scratch), arguments.alternations, arguments.steps)
    keep(arguments.json, "a step on XLA over a minimal torch_xla loop", chip, figures, "torch_xla")


def measured(scratch: Path, alternations: int, steps: int) -> tuple[ChipPeak, dict[str, object]]:
    """Return the device, and the figures of a run that alternates between the two loops."""
    tables = {
        "output": {"folder": str(scratch / "run"), "trackers": (), "log_every_steps": steps},
        "data": {"path": str(corpus(scratch / "data"))},
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
    one_step = bare_step(run)
    for _ in range(BARE_WARM_UP):
        one_step()
    sent: dict[str, list[dict[str, float]]] = {"ours": [], "bare": []}
    before = run.context.accelerator.counters()

    def chunk() -> float:
        between = run.context.accelerator.counters()
        began = time.perf_counter()
        for _ in range(steps):
            one_step()
        run.context.accelerator.synchronize()
        took = time.perf_counter() - began
        after = run.context.accelerator.counters()
        sent["ours"].append({name: between[name] - before[name] for name in between})
        sent["bare"].append({name: after[name] - between[name] for name in after})
        before.update(after)
        return took

    tracker = Alternating()
    tracker._other = chunk  # noqa: SLF001 - made for this
    facts = RunInfo(name="xla", run_id="xla", folder=run.context.folder)
    with start_trackers((tracker,), facts) as trackers:
        trackers.log(0, {})
        train(*run, trackers)
    return (
        run.context.mfu.chip,
        {
            **comparison(tracker._pairs[1:], steps),  # noqa: SLF001 - made for this
            "per_step": {
                loop: {
                    name: statistics.median(chunk[name] for chunk in chunks[1:]) / steps
                    for name in ("sent", "sent_bytes", "received", "graphs_compiled", "fallen_back")
                }
                for loop, chunks in sent.items()
            },
        },
    )


def bare_step(run: Run) -> Callable[[], None]:
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

    def one_step() -> None:
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

    return one_step


if __name__ == "__main__":
    main()
