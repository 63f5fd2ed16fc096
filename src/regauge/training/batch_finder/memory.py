"""What a run's model weighs, found on torch's meta device: nothing is allocated.

Weights, masters, gradients and moments are as the strategy will hold them; activations, and what is
gathered for a moment, come on top.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from regauge import accelerators
from regauge.data.dataset import Manifest, TokenizerFacts, read_manifest
from regauge.data.unprepared import NOTHING, expected_fields, find_rows, is_prepared
from regauge.models import architectures as models
from regauge.models.flops import FLOPS, counts, flops_per_token
from regauge.models.init_weights import META
from regauge.models.multitask import modules_by_task as parts_of
from regauge.models.tensors import dtype_of
from regauge.processes import World
from regauge.strategies import ParamSpec
from regauge.supervision.nodes.topology import several
from regauge.training import activation_checkpointing
from regauge.training import optimizer as optimizers
from regauge.training.defaults import default_strategy, local_processes
from regauge.training.objectives import build_feed, build_module
from regauge.units import GIGA

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from regauge.data.dataset import Dataset
    from regauge.data.unprepared import Described
    from regauge.models.modules import TextModule
    from regauge.strategies import Strategy
    from regauge.training.settings import Optimizer, TaskConfig, Training


PROBE = (7, 11)
"""Dimensions of a small weight by which an optimizer shows what it keeps of each."""
BYTES = 4
"""Of a moment."""


def sized(settings: Training, described: Described = NOTHING) -> dict[str, Any]:
    """Return the weights of a run's model, the cost of a token, and what each process will hold.

    `described` has the rows of datasets that are not prepared yet. Raises SettingsError for a
    model that cannot be made.
    """
    manifests = [_manifest(aim, described) for aim in settings.task_configs]
    module = build_module(settings, manifests)
    found = counts(module)
    answer: dict[str, Any] = {
        "parameters": found.all,
        **{f"{name}_parameters": count for name, count in asdict(found).items() if name != "all"},
    }
    for aim, manifest in zip(settings.task_configs, manifests, strict=True):
        part = parts_of(module)[aim.name]
        length, source = _row_length(aim, manifest, part.longest)
        if length is not None:
            of = f"_{aim.name}" if aim.name else ""
            answer |= {f"row_length{of}": length, f"row_length_source{of}": source}
            answer[f"flops_per_token{of}"] = flops_per_token(part.model, length)
            answer[f"flops_formula{of}"] = f"{FLOPS}; S = {length}"
    return {**answer, **_held(settings, module)}


def _row_length(aim: TaskConfig, manifest: Manifest, longest: int | None) -> tuple[int | None, str]:
    """Return the length of the longest row, and where it is known from."""
    if not manifest.fields:
        return longest, f"assumed: the model's longest, since no [rows] describe {aim.data.path}"
    prepared = is_prepared(Path(aim.data.path))
    source = "the prepared data" if prepared else "[rows] of the run file"
    return aim.task.ladder(manifest)[-1], source


def _manifest(aim: TaskConfig, described: Described) -> Manifest:
    """Return the dataset's manifest, or one of no data whose tokenizer suits any model.

    It has the fields of rows that are described, when they are of the task's layout.
    """
    if is_prepared(Path(aim.data.path)):
        return read_manifest(Path(aim.data.path))
    empty = hashlib.sha256(b"").hexdigest()
    facts = TokenizerFacts(sha256=empty, vocabulary=1, pad=0, mask=0, separator=0, special=())
    layout, rows = aim.task.reads(), find_rows(described, aim.data.path)
    fields = expected_fields(rows) if rows and rows.layout == layout else {}
    return Manifest(layout=layout, fields=fields, splits={}, tokenizer=facts, settings={})


def _held(settings: Training, module: nn.Module) -> dict[str, Any]:
    """Return what the fullest process holds, in gigabytes, and how many processes there are."""
    size, precision = processes_of(settings), _precision(settings)
    if precision is None:
        return {"gigabytes_per_process": "unknown: execution.precision is left to the device"}
    strategy = settings.strategy or default_strategy(size)
    parts = load(settings.optimizer, module, strategy, size, dtype_of(precision))
    parts["all"] = sum(parts.values())
    held = {name: round(count / GIGA, 6) for name, count in parts.items()}
    spread = f"{strategy.kind} over {size} processes, in {precision}"
    return {"strategy": spread, "gigabytes_per_process": held}


def load(
    settings: Optimizer, module: nn.Module, strategy: Strategy, size: int, dtype: torch.dtype
) -> dict[str, int]:
    """Return the bytes that the fullest of `size` processes holds, apart from activations."""
    weights = {
        name: ParamSpec(tuple(value.shape), value.requires_grad)
        for name, value in module.named_parameters()
    }
    found = strategy.estimate_memory(weights, size, dtype.itemsize)
    return {
        "weights": found.weights,
        "masters": found.masters,
        "gradients": found.gradients,
        "moments": BYTES * moments(settings, found.updated),
    }


def processes_of(settings: Training) -> int:
    """Return how many processes a run has, over all of its machines."""
    execution = settings.execution
    local = local_processes(execution.processes, settings.accelerator)
    found = several(execution.nodes, Path(settings.output.folder))
    return local * (found.most if found else 1)


def _precision(settings: Training) -> str | None:
    """Return what a run computes in; None where that is found out by a device that is not here."""
    if settings.execution.precision != "auto":
        return settings.execution.precision
    accelerator = settings.accelerator or accelerators.choose()[0]
    return accelerator.precisions()[0] if accelerator.available().fitness else None


def moments(settings: Optimizer, shapes: Iterable[tuple[int, ...]]) -> int:
    """Return how many values an optimizer keeps of weights with these shapes, beside them."""
    kept = {rank: _kept(settings, PROBE[:rank]) for rank in (1, 2)}
    flat = ((math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else shape for shape in shapes)
    return sum(
        math.prod(shape[axis] for axis in axes) for shape in flat for axes in kept[len(shape)]
    )


def _kept(settings: Optimizer, probe: tuple[int, ...]) -> list[list[int]]:
    """Return the dimensions of each tensor that an optimizer keeps of a weight of this shape."""
    weight = torch.nn.Parameter(torch.zeros(probe))
    optimizer = optimizers.build_optimizer(settings, {"probe": weight}.items())
    optimizers.prime_state(optimizer)
    found = optimizers.state_tensors(optimizer, {"probe": weight}).values()
    return [[probe.index(size) for size in value.shape if size in probe] for value in found]


def bytes_per_row(
    settings: Training, dataset: Dataset, module: TextModule, dtype: torch.dtype
) -> int:
    """Return what is saved of one row; the module lies on the meta device, and is used up.

    Where blocks are computed again, that is what they begin with, and the inside of one of them.
    """
    task, amount = settings.task_configs[0].task, settings.execution.activation_checkpointing
    ladder = task.ladder(dataset.manifest)
    source = build_feed(
        task, dataset, "train", world=World(), rows=1, ladder=ladder, seed=settings.seed
    )
    arrays = source.empty(task.slots_per_row(), ladder[-1])
    batch = {name: torch.from_numpy(value).to(META) for name, value in arrays.items()}
    module.to(META, dtype).train()
    module.compute_dtype = dtype
    whole = _saved(module, batch)
    if amount == "none":
        return whole
    blocks = models.blocks(module)
    activation_checkpointing.install(blocks, amount, module.dropout_keys)
    kept = _saved(module, batch)
    return kept + (whole - kept) // max(1, len(blocks))


def _saved(module: TextModule, batch: dict[str, Tensor]) -> int:
    found: dict[int, int] = {}
    storages = []

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        storages.append(storage)  # so that no other takes its place, and its number
        found[storage._cdata] = storage.nbytes()  # noqa: SLF001 - an address it has not on meta
        return value

    with saved_tensors_hooks(keep, lambda value: value):
        outputs = module(batch)
    weights = {value.untyped_storage()._cdata for value in module.parameters()}  # noqa: SLF001
    del outputs
    return sum(size for place, size in found.items() if place not in weights)
