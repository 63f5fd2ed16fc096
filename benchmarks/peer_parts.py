"""What the programs of peers share: a run file is read, and held-out rows are measured as here."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peers import STYLES
from turns import Turn

from regauge import accelerators, config, processes
from regauge.accelerators import Accelerator
from regauge.data import mixture
from regauge.data.dataset import Dataset
from regauge.data.row_order import PADDING, sample_rows
from regauge.models import multitask
from regauge.models.init_weights import build_initial_weights, materialize
from regauge.models.modules import TextModule
from regauge.models.tensors import precision_dtype
from regauge.training.defaults import check_precision
from regauge.training.heldout import HeldoutSet
from regauge.training.objectives import build_loader, build_module
from regauge.training.settings import TrainSettings


@dataclass(frozen=True)
class Order:
    """What a program is told to do."""

    folder: Path
    """Where its socket is."""
    settings: TrainSettings
    dataset: Dataset
    style: str
    turn: int
    """Steps of a turn."""
    rows: int
    """Rows that are computed at a time."""
    dtype: torch.dtype
    """Of the computation: by default fp32, else what the run has."""
    accelerator: Accelerator
    device: torch.device


def ordered(doc: str | None) -> Order:
    """Return what the command line says, with the device that this process computes on."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--style", choices=STYLES, default="best")
    parser.add_argument("--rows", type=int, help="rows that are computed at a time")
    parser.add_argument("--turn", type=int, default=5, help="steps of a turn")
    own = parser.parse_args()
    tables = config.read(own.run_file)
    tables["output"] = {"folder": str(own.folder)}
    settings = config.build(TrainSettings, tables)
    wanted = "fp32" if own.style == "default" else settings.execution.precision
    accelerator, world = settings.accelerator, processes.World()
    precision = check_precision(accelerator, wanted)
    accelerator.set_precision(precision)
    threads = settings.execution.threads or processes.cores_per_process(world)
    return Order(
        own.folder,
        settings,
        mixture.open_data(settings.data),
        own.style,
        own.turn,
        own.rows or settings.batch.rows,
        precision_dtype(precision),
        accelerator,
        accelerators.claim_device(accelerator, 0, threads),
    )


def reading(order: Order) -> TextModule:
    """Return the module of a run with its first weights, whole."""
    settings = order.settings
    (module,) = multitask.modules_by_task(build_module(settings, [order.dataset.manifest])).values()
    materialize(module, build_initial_weights(module, settings.model, settings.seed))
    return module


def taken(order: Order) -> list[int]:
    """Return the numbers of the rows of all steps, one step's after the other's."""
    settings, manifest = order.settings, order.dataset.manifest
    schedule = mixture.build_row_order(settings.data, manifest, settings.batch.rows, settings.seed)
    numbers = np.concatenate([schedule.batch(step) for step in range(settings.stop.steps)])
    return [number for number in numbers.tolist() if number != PADDING]


def measuring(order: Order, reader: TextModule) -> Callable[[], float]:
    """Return what measures a module's held-out loss by this project's own path, masks included."""
    settings, dataset, dtype, device = order.settings, order.dataset, order.dtype, order.device
    task, manifest = settings.task_configs[0].task, dataset.manifest
    reader.compute_dtype = dtype
    own = build_loader(
        task, dataset, "heldout", world=processes.World(), rows=settings.batch.microbatch,
        bucket_lengths=task.bucket_lengths(manifest), seed=settings.seed,
    )  # fmt: skip
    numbers = sample_rows(len(own), settings.evaluation.rows, manifest.identity)
    heldout = HeldoutSet(task, order.accelerator, lambda: None, device, own, numbers)

    def measured() -> float:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = heldout.compute_metrics(reader)["loss"]
        reader.train()
        return loss

    return measured


def optimized(
    order: Order, weights: list[torch.Tensor]
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Return AdamW, which decays matrices, and its schedule; fused unless it is by default."""
    wanted, steps = order.settings.optimizer, order.settings.stop.steps
    groups = [
        {
            "params": [each for each in weights if each.ndim > 1],
            "weight_decay": wanted.weight_decay,
        },
        {"params": [each for each in weights if each.ndim == 1], "weight_decay": 0.0},
    ]
    fused = order.style != "default"
    rate, moments, least = wanted.learning_rate, wanted.betas, wanted.epsilon
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=moments, eps=least, fused=fused)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)


def in_turns(order: Order, steps: Iterator[int], measured: Callable[[], float]) -> None:
    """Compute steps, each of which says what it counted, until nobody wants another turn."""
    turn = Turn(order.folder, order.accelerator)
    count = 0
    turn.wait()
    for step, own in enumerate(steps, start=1):
        count += own
        if step % order.turn == 0:
            turn.stop()
            turn.end(step=step, count=count, heldout=measured())
            count = 0
