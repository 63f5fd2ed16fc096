"""Common parts of the peer scripts: reading a run file, and Regauge's held-out evaluation."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peers import STYLES
from turns import Turn

from regauge import accelerators, config
from regauge.accelerators import Accelerator
from regauge.data import mixture
from regauge.data.dataset import Dataset
from regauge.data.loader import build_loader
from regauge.data.row_order import PADDING, sample_rows
from regauge.models import multitask
from regauge.models.init_weights import build_initial_weights, materialize
from regauge.models.modules import TextModule
from regauge.models.tensors import precision_dtype
from regauge.system import processes
from regauge.training.defaults import check_precision
from regauge.training.heldout import HeldoutSet
from regauge.training.optimizer_defaults import resolve_optimizer
from regauge.training.settings import TrainSettings
from regauge.training.task_runtime import build_module


@dataclass(frozen=True)
class PeerRun:
    """The run that a peer trains."""

    folder: Path
    """Folder of the socket."""
    settings: TrainSettings
    dataset: Dataset
    style: str
    steps_per_turn: int
    rows: int
    """Rows of a microbatch."""
    dtype: torch.dtype
    """Dtype of the computation: fp32 in the style `default`, else the run's precision."""
    accelerator: Accelerator
    device: torch.device


def parse_run(doc: str | None) -> PeerRun:
    """Return the run of the command line; claims the device for this process."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--style", choices=STYLES, default="best")
    parser.add_argument("--rows", type=int, help="rows of a microbatch")
    parser.add_argument("--steps-per-turn", type=int, default=5)
    options = parser.parse_args()
    tables = config.read(options.run_file)
    tables["output"] = {"folder": str(options.folder)}
    settings, _ = resolve_optimizer(config.build(TrainSettings, tables))
    if settings.batch.microbatch_rows == "auto":
        batch = settings.batch.model_copy(update={"microbatch_rows": settings.batch.rows})
        settings = settings.model_copy(update={"batch": batch})
    requested = "fp32" if options.style == "default" else settings.execution.precision
    accelerator, world = settings.accelerator, processes.World()
    precision = check_precision(accelerator, requested)
    accelerator.set_precision(precision)
    threads = settings.execution.threads or processes.cores_per_process(world)
    return PeerRun(
        options.folder,
        settings,
        mixture.open_data(settings.data),
        options.style,
        options.steps_per_turn,
        options.rows or settings.batch.rows,
        precision_dtype(precision),
        accelerator,
        accelerators.claim_device(accelerator, 0, threads),
    )


def build_run_module(run: PeerRun) -> TextModule:
    """Return the module of a run with its initial weights, not sharded."""
    settings = run.settings
    (module,) = multitask.modules_by_task(build_module(settings, [run.dataset.manifest])).values()
    materialize(module, build_initial_weights(module, settings.model, settings.seed))
    return module


def list_rows(run: PeerRun) -> list[int]:
    """Return the row numbers of all steps, in the order of the steps."""
    settings, manifest = run.settings, run.dataset.manifest
    schedule = mixture.build_row_order(settings.data, manifest, settings.batch.rows, settings.seed)
    numbers = np.concatenate([schedule.batch(step) for step in range(settings.stop.steps)])
    return [number for number in numbers.tolist() if number != PADDING]


def build_evaluation(run: PeerRun, module: TextModule) -> Callable[[], float]:
    """Return a function that computes the held-out loss with Regauge's evaluation and masks."""
    settings, dataset, dtype, device = run.settings, run.dataset, run.dtype, run.device
    task, manifest = settings.task_configs[0].task, dataset.manifest
    module.compute_dtype = dtype
    loader = build_loader(
        task, dataset, "heldout", world=processes.World(), rows=settings.batch.microbatch,
        bucket_lengths=task.bucket_lengths(manifest), seed=settings.seed,
    )  # fmt: skip
    numbers = sample_rows(len(loader), settings.evaluation.rows, manifest.fingerprint)
    heldout = HeldoutSet(task, run.accelerator, lambda: None, device, loader, numbers)

    def evaluate() -> float:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = heldout.evaluate(module)[0]["loss"]
        module.train()
        return loss

    return evaluate


def build_optimizer(
    run: PeerRun, weights: list[torch.Tensor]
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Return AdamW with weight decay on matrices, and its schedule; fused except by default."""
    options, steps = run.settings.optimizer, run.settings.stop.steps
    groups = [
        {
            "params": [weight for weight in weights if weight.ndim > 1],
            "weight_decay": options.weight_decay,
        },
        {"params": [weight for weight in weights if weight.ndim == 1], "weight_decay": 0.0},
    ]
    fused = run.style != "default"
    optimizer = torch.optim.AdamW(
        groups,
        lr=options.peak_learning_rate,
        betas=options.moment_decay_rates,
        eps=options.epsilon,
        fused=fused,
    )
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)


def train_in_turns(run: PeerRun, steps: Iterator[int], evaluate: Callable[[], float]) -> None:
    """Compute steps, each of which yields its count, until there is no other turn."""
    turn = Turn(run.folder, run.accelerator)
    total = 0
    turn.wait()
    for step, count in enumerate(steps, start=1):
        total += count
        if step % run.steps_per_turn == 0:
            turn.stop()
            turn.end(step=step, count=total, heldout=evaluate())
            total = 0
