"""Loads weights to evaluate, and reference values from runs' start weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from regauge.config import build, read_saved_run
from regauge.models.init_weights import META, build_initial_weights, materialize
from regauge.models.tensors import move_module
from regauge.system.errors import SettingsError
from regauge.training.references import attach_references, compute_references
from regauge.training.settings import TrainSettings
from regauge.training.warm_start import use_copied_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import nn

    from regauge.data.dataset import Dataset
    from regauge.models.settings import Model
    from regauge.training.heldout import HeldoutSet


class StartWeights(NamedTuple):
    """Weights read from a model folder, or drawn."""

    model: Model
    seed: int
    """Seed for drawn weights."""


def load_weights(
    heldout: HeldoutSet, start: StartWeights, dataset: Dataset, dtype: torch.dtype
) -> nn.Module:
    """Return a task's module on the device of the held-out rows."""
    with META:
        module = heldout.task.build_module(start.model, dataset.manifest, start.seed)
    materialize(module, build_initial_weights(module, start.model, start.seed))
    module.compute_dtype = dtype
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)
    move_module(module, heldout.device)
    heldout.accelerator.retain_freed_memory()
    return heldout.accelerator.prepare_for_inference(module.eval())


def find_start_weights(run: Path | None) -> StartWeights | None:
    """Return the step 0 weights of a run whose task has reference values, else None."""
    if run is None:
        return None
    settings = build(TrainSettings, read_saved_run(run))
    if not any(config.task.reference_columns for config in settings.task_configs):
        return None
    output = settings.output.model_copy(update={"folder": str(run)})
    model = use_copied_weights(settings.model_copy(update={"output": output})).model
    return StartWeights(model.model_copy(update={"lora": None}), settings.seed)


def add_references(
    heldout_sets: Mapping[str, HeldoutSet],
    runs: Mapping[str, Path | None],
    load_module: Callable[[HeldoutSet, StartWeights], nn.Module],
) -> None:
    """Add reference values to each model's held-out rows; every process calls this.

    Both mappings have the model names. A model without such a run gets the values of the first
    model with one, so that all models' rewards are comparable. Raises SettingsError if there is
    none.
    """
    starts = {name: find_start_weights(run) for name, run in runs.items()}
    first = next((start for start in starts.values() if start is not None), None)
    values: dict[str, torch.Tensor] = {}
    for name, heldout in heldout_sets.items():
        start = starts[name] or first
        if start is None:
            problem = f"no model is from a run of task '{heldout.task.kind}'"
            remedy = "add the folder of such a run to models; its start is the reference"
            raise SettingsError(problem, remedy)
        key = f"{start} {heldout.task.model_dump_json()}"
        if key not in values:
            shape = len(heldout.loader), len(heldout.task.reference_columns)
            values[key] = torch.full(shape, torch.nan)
            rows = compute_references(heldout, load_module(heldout, start))
            values[key][heldout.row_numbers] = rows
        attach_references(heldout, values[key])
