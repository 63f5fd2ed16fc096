"""The held-out metrics of a compiled program: by the one evaluation path, and its own batches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from regauge.accelerators import REFERENCE
from regauge.artifacts.engine import Answering, loaded
from regauge.config import choose
from regauge.data.dataset import Dataset
from regauge.data.row_order import sample
from regauge.evaluation.settings import DEFAULT_MICROBATCH_ROWS
from regauge.processes import World
from regauge.training.heldout import HeldoutSet
from regauge.training.objectives import build_feed

if TYPE_CHECKING:
    from regauge.accelerators import Accelerator
    from regauge.artifacts.artifact import Artifact
    from regauge.tasks import Task


def answering(artifact: Artifact) -> Answering:
    """Return an artifact at work, loaded on a device of its own kind."""
    program = artifact.manifest.program
    engine = loaded(artifact, invariant=False)
    return Answering(engine, program.answers, program.fields)


def metrics(module: nn.Module, task: Task, dataset: Path, rows: int) -> dict[str, float]:
    """Return the metrics of a module on so many held-out rows; empty where none are held out."""
    found = Dataset(dataset)
    if not len(found.split("heldout")):
        return {}
    reference: Accelerator = choose("accelerators", REFERENCE)
    share = build_feed(
        task,
        found,
        "heldout",
        world=World(),
        rows=DEFAULT_MICROBATCH_ROWS,
        ladder=task.ladder(found.manifest),
        seed=0,
    )
    numbers = sample(len(share), rows, found.manifest.identity)
    mark, device = reference.end_microbatch, torch.device("cpu")
    return HeldoutSet(task, reference, mark, device, share, numbers).metrics(module)
