"""Measures weights and activations on torch's meta device, without allocating the module.

Temporary buffers, such as gathered weights, are not included.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import saved_tensors_hooks

from regauge.data.loader import build_loader
from regauge.models import architectures
from regauge.models.flops import count_parameters, flops_per_token
from regauge.models.init_weights import META
from regauge.models.multitask import modules_by_task
from regauge.models.weight_shapes import ParamSpec
from regauge.system.processes import World
from regauge.training import activation_checkpointing
from regauge.training.batch_finder.model_size import ModelSize, TaskSize
from regauge.training.task_runtime import build_module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from regauge.data.dataset import Dataset, DatasetManifest
    from regauge.models.modules import TextModule
    from regauge.training.settings import TrainSettings


def measure_module(settings: TrainSettings, manifests: Sequence[DatasetManifest]) -> ModelSize:
    """Measure the run's model, built on the meta device."""
    module = build_module(settings, manifests)
    tasks = {
        name: TaskSize(part.max_tokens, partial(flops_per_token, part.model))
        for name, part in modules_by_task(module).items()
    }
    return ModelSize(count_parameters(module), list_weights(module), tasks)


def list_weights(module: nn.Module) -> dict[str, ParamSpec]:
    return {
        name: ParamSpec(tuple(value.shape), value.requires_grad)
        for name, value in module.named_parameters()
    }


def estimate_row_bytes(
    settings: TrainSettings, dataset: Dataset, module: TextModule, dtype: torch.dtype
) -> int:
    """Return the activation bytes saved per row.

    The module is on the meta device and cannot be used afterwards. With activation checkpointing
    these are the inputs of all blocks, and the activations inside one block.
    """
    task, mode = settings.task_configs[0].task, settings.execution.activation_checkpointing
    lengths = task.bucket_lengths(dataset.manifest)
    loader = build_loader(
        task, dataset, "train", world=World(), rows=1, bucket_lengths=lengths, seed=settings.seed
    )
    arrays = loader.build_empty_batch(task.slots_per_row(), lengths[-1])
    batch = {name: torch.from_numpy(value).to(META) for name, value in arrays.items()}
    module.to(META, dtype).train()
    module.compute_dtype = dtype
    all_bytes = _measure_saved_bytes(module, batch)
    if mode == "none":
        return all_bytes
    blocks = architectures.find_blocks(module)
    activation_checkpointing.apply_checkpointing(blocks, mode, module.dropout_keys)
    checkpoint_bytes = _measure_saved_bytes(module, batch)
    return checkpoint_bytes + (all_bytes - checkpoint_bytes) // max(1, len(blocks))


def _measure_saved_bytes(module: TextModule, batch: dict[str, Tensor]) -> int:
    """Return the bytes saved by autograd in a forward pass, weights excluded."""
    sizes: dict[int, int] = {}  # bytes by storage; storages on the meta device have no address
    storages = []

    def record_storage(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        storages.append(storage)  # keep it alive, so its key stays unique
        sizes[storage._cdata] = storage.nbytes()  # noqa: SLF001 - no public key of a storage
        return value

    with saved_tensors_hooks(record_storage, lambda value: value):
        outputs = module(batch)
    weights = {value.untyped_storage()._cdata for value in module.parameters()}  # noqa: SLF001
    del outputs
    return sum(size for key, size in sizes.items() if key not in weights)
