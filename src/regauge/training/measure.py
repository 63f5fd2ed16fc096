"""Saved models on held-out rows, beside each other in one table: `evaluation.json`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from regauge.accelerators import dtype_of, join, take
from regauge.checkpoint.folder import write_json
from regauge.config import FORMAT, dump
from regauge.data.order import sample
from regauge.data.shards import Dataset
from regauge.errors import DataError, SettingsError
from regauge.models.build import weights_at
from regauge.models.placing import move
from regauge.models.settings import Model
from regauge.training.decisions import settle
from regauge.training.opening import feed
from regauge.training.scoring import Heldout
from regauge.training.step import means

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    from regauge.processes import World
    from regauge.training.settings import Evaluating

EVALUATION = "evaluation.json"
MICROBATCH_ROWS = 64
Row = dict[str, Any]


def measure(settings: Evaluating, world: World) -> dict[str, Any]:
    """Return the table of every model that was asked for; every process calls this."""
    dataset = Dataset(Path(settings.data.path))
    settings.task.check(dataset.manifest)
    if len(dataset.split("heldout")) == 0:
        raise DataError(f"{settings.data.path} has no held-out rows", "raise split.heldout_share")
    models = {name: _checked(folder, dataset) for name, folder in settings.subjects.models.items()}
    accelerator, execution = settle(settings.accelerator, settings.execution, world)
    device = take(accelerator, world.device, execution.threads or 1)
    join(accelerator, world, execution.timeout_seconds)
    share = feed(
        settings.task,
        dataset,
        world,
        split="heldout",
        rows=settings.evaluation.microbatch_rows or MICROBATCH_ROWS,
        seed=settings.seed,
    )
    numbers = sample(len(share), settings.evaluation.rows, dataset.manifest.identity)
    heldout = Heldout(
        settings.task, accelerator, accelerator.end_microbatch, device, share, numbers
    )
    rows = _rows(
        settings,
        dataset,
        heldout,
        models,
        dtype_of(execution.precision),
    )
    if dist.is_initialized():
        dist.barrier()
    own = settings.model_copy(update={"accelerator": accelerator, "execution": execution})
    return _write(own, rows, world, numbers, dataset.manifest.identity)


def _checked(folder: str, dataset: Dataset) -> Path:
    """Return where a model lies; raises SettingsError for none, or one of another tokenizer."""
    found = Path(weights_at(folder))
    if not (found / "config.json").is_file():
        remedy = "name a finished run's output folder, or a transformers folder"
        raise SettingsError(f"{folder} holds no trained model", remedy)
    dataset.check_tokenizer(found)
    return found


def _rows(
    settings: Evaluating,
    dataset: Dataset,
    heldout: Heldout,
    models: dict[str, Path],
    dtype: torch.dtype,
) -> list[Row]:
    rows: list[Row] = []

    def placed(model: Model) -> nn.Module:
        module = settings.task.module(model, dataset.manifest, settings.seed)
        module.compute_dtype = dtype
        move(module.to(dtype), heldout.device)
        return heldout.accelerator.for_inference(module.eval())

    if settings.subjects.untrained == "yes":
        first = next(iter(models.values()))
        model = Model(path=str(first), weights="random")
        rows.append({"name": "untrained", **heldout.metrics(placed(model))})
    outputs: dict[str, torch.Tensor] = {}
    for name, folder in models.items():
        metrics, outputs = heldout.outputs(placed(Model(path=str(folder))))
        rows.append({"name": name, **metrics})
    whole = dataset.texts("heldout")
    if settings.subjects.rivals == "yes" and whole and outputs:
        texts = [whole[number] for number in heldout.numbers.tolist()]
        found = settings.task.rivals(outputs, outputs, texts)
        rows += [{"name": name, **means(sums)} for name, sums in found.items()]
    return rows


def _write(
    settings: Evaluating, rows: list[Row], world: World, numbers: np.ndarray, identity: str
) -> dict[str, Any]:
    folder = Path(settings.output.folder)
    table = {
        "format": FORMAT,
        "title": settings.subjects.title,
        "rows": rows,
        "notes": [f"{len(numbers)} held-out rows of {settings.data.path}"],
        "settings": dump(settings),
        "facts": {"data_identity": identity},
    }
    if world.first:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / EVALUATION, table)
    return {"output": str(folder / EVALUATION), "rows": rows}
