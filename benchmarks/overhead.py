"""Overhead of the training loop over a bare PyTorch loop with the same operations.

One process alternates between two loops. One does some steps of `regauge train`, with data loading,
metrics and ledger. The other is a hand-written loop over batches in memory. Both use the same
precision with fp32 masters, clipping and fused AdamW.

    python benchmarks/overhead.py [--alternations 12] [--steps 10] [--json OUT]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from pydantic import PrivateAttr
from recording import RESULTS, write_result
from text import prepare_library_docs

from regauge.accelerators.cpu import Cpu
from regauge.config import build
from regauge.models.tensors import precision_dtype
from regauge.monitoring.trackers import RunInfo, Tracker, start_trackers
from regauge.system import processes
from regauge.training.defaults import resolve_defaults
from regauge.training.run_setup import Run, set_up
from regauge.training.settings import TrainSettings
from regauge.training.trainer import train

LIMIT = 0.03
CONFIDENCE_Z = 1.96
ROWS, MICROBATCH_ROWS = 64, 32
MODEL = {
    "architecture": "bert",
    "config": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "max_position_embeddings": 128,
    },
}


class Alternating(Tracker):
    """Times the steps between two metrics lines, then runs the other loop."""

    kind = "alternating"
    _other: Callable[[], float] = PrivateAttr()
    _since: float = PrivateAttr(default=0.0)
    _pairs: list[tuple[float, float]] = PrivateAttr(default_factory=list)

    def start(self, run: RunInfo) -> None:
        """Do nothing: there is nothing to open."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the steps that ended here, and time the other loop."""
        del step
        if "train/loss" in values:
            seconds = time.perf_counter() - self._since
            self._pairs.append((seconds, self._other()))
        self._since = time.perf_counter()


def main() -> None:
    """Print and write the overhead with its confidence interval."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--alternations", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, default=RESULTS / "overhead.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        pairs = alternate(Path(scratch), arguments.alternations, arguments.steps)
    figures = {"rows_per_step": ROWS, **compare_loops(pairs, arguments.steps)}
    benchmark = "overhead of the loop over a bare PyTorch loop"
    write_result(arguments.json, benchmark, Cpu().chip_peak("bf16"), figures)


def alternate(scratch: Path, alternations: int, steps: int) -> list[tuple[float, float]]:
    """Return the seconds of (Regauge, bare loop) per alternation, without the first one."""
    data = prepare_library_docs(scratch / "data")
    tables = {
        "output": {"folder": str(scratch / "run"), "trackers": (), "log_every_steps": steps},
        "data": {"path": str(data)},
        "task": "mlm",
        "model": MODEL,
        "accelerator": "cpu",
        "batch": {"rows": ROWS, "microbatch_rows": MICROBATCH_ROWS},
        "stop": {"steps": (alternations + 1) * steps},
        "evaluation": {"rows": 2},
    }
    world = processes.World()
    settings = resolve_defaults(build(TrainSettings, tables), world)
    run = set_up(settings, world)
    run.context.folder.mkdir()
    tracker = Alternating()
    tracker._other = build_bare_loop(run, steps)  # noqa: SLF001 - a class of this file
    facts = RunInfo(name="overhead", run_id="overhead", folder=run.context.folder)
    with start_trackers((tracker,), facts) as trackers:
        trackers.log(0, {})
        train(*run, trackers)
    return tracker._pairs[1:]  # noqa: SLF001 - a class of this file


def build_bare_loop(run: Run, steps: int) -> Callable[[], float]:
    """Return a function that does `steps` hand-written steps, and returns their seconds."""
    settings, task = run.context.settings, run.context.task_at(run.state.step).task
    module = task.build_module(
        settings.model, run.context.task_at(run.state.step).manifest, settings.seed
    )
    module.compute_dtype = precision_dtype(settings.execution.precision)
    masters = [value.detach().clone() for value in module.parameters()]
    module.to(module.compute_dtype).train()
    working = list(module.parameters())
    matrices = [{"params": [value for value in masters if value.ndim > 1], "weight_decay": 0.01}]
    vectors = [{"params": [value for value in masters if value.ndim < 2], "weight_decay": 0.0}]  # noqa: PLR2004
    optimizer = torch.optim.AdamW(matrices + vectors, lr=1e-4, betas=(0.9, 0.98), fused=True)
    arrays = run.context.read_batches(0)
    batches = [{name: torch.from_numpy(value) for name, value in part.items()} for part in arrays]

    def do_step() -> None:
        for batch in batches:
            loss, _ = task.loss(module(batch), batch)
            loss.backward()
            for master, weight in zip(masters, working, strict=True):
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                weight.grad = None
        count = sum(batch["weights"].sum() for batch in batches)
        torch._foreach_mul_([master.grad for master in masters], 1 / count)
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(working, masters)

    def time_steps() -> float:
        began = time.perf_counter()
        for _ in range(steps):
            do_step()
        return time.perf_counter() - began

    return time_steps


def compare_loops(pairs: list[tuple[float, float]], steps: int) -> dict[str, object]:
    """Return the mean overhead with its 95 % interval; the limit is met if it is not below."""
    ratios = [seconds / bare - 1 for seconds, bare in pairs]
    mean = statistics.mean(ratios)
    error = CONFIDENCE_Z * statistics.stdev(ratios) / len(ratios) ** 0.5
    return {
        "alternations": len(pairs),
        "steps_per_chunk": steps,
        "seconds_per_step": statistics.median(seconds for seconds, _ in pairs) / steps,
        "bare_seconds_per_step": statistics.median(bare for _, bare in pairs) / steps,
        "overhead": mean,
        "interval_95": [mean - error, mean + error],
        "limit": LIMIT,
        "met": mean - error <= LIMIT,
    }


if __name__ == "__main__":
    main()
