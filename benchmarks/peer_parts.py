"""What the programs of peers share: a run file is read, and held-out rows are measured as here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from regauge import accelerators, config, processes
from regauge.accelerators.cpu import Cpu
from regauge.data import mixing
from regauge.data.order import PADDING, sample
from regauge.data.shards import Dataset
from regauge.models import several
from regauge.models.initial import fill, first_weights
from regauge.models.placing import dtype_of
from regauge.models.text import TextModule
from regauge.training.objectives import feed, made
from regauge.training.scoring import Heldout
from regauge.training.settings import Training


@dataclass(frozen=True)
class Order:
    """What a program is told to do."""

    folder: Path
    """Where its socket is."""
    settings: Training
    dataset: Dataset
    style: str
    turn: int
    """Steps of a turn."""
    rows: int
    """Rows that are computed at a time."""
    dtype: torch.dtype
    """Of the computation: by default fp32, else what the run has."""


def ordered(doc: str | None) -> Order:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--style", choices=("best", "compiled", "default"), default="best")
    parser.add_argument("--rows", type=int, help="rows that are computed at a time")
    parser.add_argument("--turn", type=int, default=5, help="steps of a turn")
    own = parser.parse_args()
    tables = config.read(own.run_file)
    tables["output"] = {"folder": str(own.folder)}
    settings = config.build(Training, tables)
    wanted = "fp32" if own.style == "default" else settings.execution.precision
    dtype = dtype_of(accelerators.settle_precision(Cpu(), wanted))
    dataset = mixing.opened(settings.data)
    rows = own.rows or settings.batch.rows
    return Order(own.folder, settings, dataset, own.style, own.turn, rows, dtype)


def reading(order: Order) -> TextModule:
    """Return the module of a run with its first weights, whole."""
    settings = order.settings
    (module,) = several.parts(made(settings, [order.dataset.manifest])).values()
    fill(module, first_weights(module, settings.model, settings.seed))
    return module


def taken(order: Order) -> list[int]:
    """Return the numbers of the rows of all steps, one step's after the other's."""
    settings, manifest = order.settings, order.dataset.manifest
    schedule = mixing.order(settings.data, manifest, settings.batch.rows, settings.seed)
    numbers = np.concatenate([schedule.batch(step) for step in range(settings.stop.steps)])
    return [number for number in numbers.tolist() if number != PADDING]


def measuring(order: Order, reader: TextModule) -> Callable[[], float]:
    """Return what measures a module's held-out loss by this project's own path, masks included."""
    settings, dataset, dtype = order.settings, order.dataset, order.dtype
    task, manifest = settings.aims[0].task, dataset.manifest
    reader.compute_dtype = dtype
    accelerator, world = Cpu(), processes.World()
    threads = settings.execution.threads or processes.share_of_cores(world)
    device = accelerators.take(accelerator, 0, threads)
    accelerators.join(accelerator, world, settings.execution.timeout_seconds)
    own = feed(
        task, dataset, "heldout", world=world, rows=settings.batch.microbatch,
        ladder=task.ladder(manifest), seed=settings.seed,
    )  # fmt: skip
    numbers = sample(len(own), settings.evaluation.rows, manifest.identity)
    heldout = Heldout(task, accelerator, lambda: None, device, own, numbers)

    def measured() -> float:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = heldout.metrics(reader)["loss"]
        reader.train()
        return loss

    return measured
