"""What the backward pass keeps of a microbatch, found on torch's meta device.

Nothing is allocated: a forward pass of one row of the longest declared shape is only walked
through, and what autograd would save of it is counted, each storage once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import saved_tensors_hooks

from regauge.models import build as models
from regauge.models.initial import META
from regauge.processes import World
from regauge.training import recompute
from regauge.training.objectives import feed

if TYPE_CHECKING:
    from torch import Tensor

    from regauge.data.shards import Dataset
    from regauge.models.text import TextModule
    from regauge.training.settings import Training


def bytes_per_row(
    settings: Training, dataset: Dataset, module: TextModule, dtype: torch.dtype
) -> int:
    """Return what is saved of one row; the module lies on the meta device, and is used up.

    Where blocks are computed again, that is what they begin with, and the inside of one of them.
    """
    task, amount = settings.aims[0].task, settings.execution.activation_checkpointing
    ladder = task.ladder(dataset.manifest)
    source = feed(task, dataset, "train", world=World(), rows=1, ladder=ladder, seed=settings.seed)
    arrays = source.empty(task.slots_per_row(), ladder[-1])
    batch = {name: torch.from_numpy(value).to(META) for name, value in arrays.items()}
    module.to(META, dtype).train()
    module.compute_dtype = dtype
    whole = _saved(module, batch)
    if amount == "none":
        return whole
    blocks = models.blocks(module)
    recompute.install(blocks, amount, module.dropout_keys)
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
