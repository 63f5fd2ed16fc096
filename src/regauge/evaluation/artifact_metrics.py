"""Held-out metrics of a compiled program, computed by the evaluation path of training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from regauge.accelerators import REFERENCE_KIND
from regauge.config import parse_choice
from regauge.data.dataset import Dataset
from regauge.data.row_order import sample_rows
from regauge.evaluation.settings import DEFAULT_MICROBATCH_ROWS
from regauge.inference.export.engine import EngineModule, load_engine
from regauge.system.processes import World
from regauge.training.heldout import HeldoutSet
from regauge.training.task_runtime import build_loader

if TYPE_CHECKING:
    from regauge.accelerators import Accelerator
    from regauge.inference.export.artifact import Artifact
    from regauge.tasks import Task


def load_as_module(artifact: Artifact) -> EngineModule:
    """Load an artifact on the accelerator that it was compiled for, as the module of a task."""
    program = artifact.manifest.program
    engine = load_engine(artifact, batch_invariant=False)
    return EngineModule(engine, program.output_kind, program.fields)


def compute_heldout_metrics(
    module: nn.Module, task: Task, dataset: Path, rows: int
) -> dict[str, float]:
    """Return the metrics of a module on at most `rows` held-out rows of a dataset.

    Returns an empty dict if the dataset has no held-out rows.
    """
    opened = Dataset(dataset)
    if not len(opened.rows("heldout")):
        return {}
    task = task.resolve_defaults(opened.manifest)
    reference: Accelerator = parse_choice("accelerators", REFERENCE_KIND)
    loader = build_loader(
        task,
        opened,
        "heldout",
        world=World(),
        rows=DEFAULT_MICROBATCH_ROWS,
        bucket_lengths=task.bucket_lengths(opened.manifest),
        seed=0,
    )
    row_numbers = sample_rows(len(loader), rows, opened.manifest.fingerprint)
    end_microbatch, device = reference.end_microbatch, torch.device("cpu")
    heldout = HeldoutSet(task, reference, end_microbatch, device, loader, row_numbers)
    return heldout.compute_metrics(module)
