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

from regauge import accelerators
from regauge.data.shards import MANIFEST, Manifest, TokenizerFacts, read_manifest
from regauge.models.counting import FLOPS, counts, flops_per_token
from regauge.models.placing import dtype_of
from regauge.models.several import parts as parts_of
from regauge.strategies import Form
from regauge.supervision.nodes.several import several
from regauge.training import optimizer as optimizers
from regauge.training.decisions import local_processes, usual
from regauge.training.objectives import made

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from regauge.strategies import Strategy
    from regauge.training.optimizer_settings import Optimizer
    from regauge.training.settings import Aim, Training

PROBE = (7, 11)
"""Dimensions of a small weight by which an optimizer shows what it keeps of each."""
BYTES = 4
"""Of a moment."""
GIGA = 1e9


def sized(settings: Training) -> dict[str, Any]:
    """Return the weights of a run's model, the cost of a token, and what each process will hold.

    Raises SettingsError for a model that cannot be made.
    """
    manifests = [_manifest(aim) for aim in settings.aims]
    module = made(settings, manifests)
    found = counts(module)
    answer: dict[str, Any] = {
        "parameters": found.all,
        **{f"{name}_parameters": count for name, count in asdict(found).items() if name != "all"},
    }
    for aim, manifest in zip(settings.aims, manifests, strict=True):
        part = parts_of(module)[aim.name]
        length = aim.task.ladder(manifest)[-1] if manifest.fields else part.longest
        if length is not None:
            of = f"_{aim.name}" if aim.name else ""
            answer[f"flops_per_token{of}"] = flops_per_token(part.model, length)
            answer[f"flops_formula{of}"] = f"{FLOPS}; S = {length}"
    return {**answer, **_held(settings, module)}


def _manifest(aim: Aim) -> Manifest:
    """Return the dataset's manifest, or one of no data whose tokenizer suits any model."""
    if (Path(aim.data.path) / MANIFEST).exists():
        return read_manifest(Path(aim.data.path))
    empty = hashlib.sha256(b"").hexdigest()
    facts = TokenizerFacts(sha256=empty, vocabulary=1, pad=0, mask=0, separator=0, special=())
    layout = aim.task.layout
    return Manifest(layout=layout, fields={}, splits={}, tokenizer=facts, settings={})


def _held(settings: Training, module: nn.Module) -> dict[str, Any]:
    """Return what the fullest process holds, in gigabytes, and how many processes there are."""
    size, precision = processes_of(settings), _precision(settings)
    if precision is None:
        return {"gigabytes_per_process": "unknown: execution.precision is left to the device"}
    strategy = settings.strategy or usual(size)
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
        name: Form(tuple(value.shape), value.requires_grad)
        for name, value in module.named_parameters()
    }
    found = strategy.load(weights, size, dtype.itemsize)
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
    optimizer = optimizers.build(settings, {"probe": weight}.items())
    optimizers.prime(optimizer)
    found = optimizers.tensors(optimizer, {"probe": weight}).values()
    return [[probe.index(size) for size in value.shape if size in probe] for value in found]
