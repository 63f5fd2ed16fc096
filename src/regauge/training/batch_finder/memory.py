"""Predicts the memory of a run on torch's meta device, without allocating it.

Weights, master weights, gradients and moments follow from the strategy. Activations are measured on
the meta device. Temporary buffers, such as gathered weights, are not included.
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
from regauge.data.dataset import DatasetManifest, TokenizerInfo, read_manifest
from regauge.data.unprepared import NO_ROWS, expected_fields, find_rows, is_prepared
from regauge.models import architectures
from regauge.models.flops import FLOPS_FORMULA, count_parameters, flops_per_token
from regauge.models.init_weights import META
from regauge.models.multitask import modules_by_task
from regauge.models.tensors import precision_dtype
from regauge.processes import World
from regauge.strategies import ParamSpec
from regauge.supervision.nodes.topology import resolve_topology
from regauge.training import activation_checkpointing
from regauge.training.defaults import count_local_processes, default_strategy
from regauge.training.optimizer import build_optimizer, prime_state, state_tensors
from regauge.training.task_runtime import build_loader, build_module
from regauge.units import GIGA

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from regauge.data.dataset import Dataset
    from regauge.data.unprepared import RowsByFolder
    from regauge.models.modules import TextModule
    from regauge.strategies import Strategy
    from regauge.training.settings import Optimizer, TaskConfig, TrainSettings

PROBE_SHAPE = (7, 11)
"""Shape of a small weight that shows which moments an optimizer keeps."""
BYTES_PER_MOMENT = 4


def describe_model(settings: TrainSettings, described: RowsByFolder = NO_ROWS) -> dict[str, Any]:
    """Return the parameters of a model, the FLOPs per token, and the memory of each process.

    `described` has the `[rows]` tables of datasets that are not prepared yet. Raises SettingsError
    if the model cannot be built.
    """
    manifests = [_find_manifest(config, described) for config in settings.task_configs]
    module = build_module(settings, manifests)
    counts = count_parameters(module)
    description: dict[str, Any] = {
        "parameters": counts.all,
        **{f"{name}_parameters": count for name, count in asdict(counts).items() if name != "all"},
    }
    for config, manifest in zip(settings.task_configs, manifests, strict=True):
        if assumption := config.task.find_assumption(manifest):
            description[f"assumed_{config.name}" if config.name else "assumed"] = assumption
        task_module = modules_by_task(module)[config.name]
        length, source = _find_row_length(config, manifest, task_module.max_tokens)
        if length is not None:
            suffix = f"_{config.name}" if config.name else ""
            description |= {f"row_length{suffix}": length, f"row_length_source{suffix}": source}
            description[f"flops_per_token{suffix}"] = flops_per_token(task_module.model, length)
            description[f"flops_formula{suffix}"] = f"{FLOPS_FORMULA}; S = {length}"
    return {**description, **_describe_memory(settings, module)}


def _find_row_length(
    config: TaskConfig, manifest: DatasetManifest, max_tokens: int | None
) -> tuple[int | None, str]:
    """Return the length of the longest row in tokens, and the source of this length."""
    dataset = config.data.path
    if not manifest.columns:
        return max_tokens, f"assumed: the maximum of the model, no [rows] table is for {dataset}"
    source = "the prepared data" if is_prepared(Path(dataset)) else "[rows] of the run file"
    return config.task.bucket_lengths(manifest)[-1], source


def _find_manifest(config: TaskConfig, described: RowsByFolder) -> DatasetManifest:
    """Return the manifest of a dataset, or an empty one with a tokenizer that suits every model.

    An empty manifest has the fields of the `[rows]` table, if that has the layout of the task.
    """
    if is_prepared(Path(config.data.path)):
        return read_manifest(Path(config.data.path))
    empty = hashlib.sha256(b"").hexdigest()
    facts = TokenizerInfo(
        sha256=empty,
        vocab_size=1,
        pad_token_id=0,
        mask_token_id=0,
        sep_token_id=0,
        special_token_ids=(),
    )
    layout, rows = config.task.row_layout(), find_rows(described, config.data.path)
    fields = expected_fields(rows) if rows and rows.layout == layout else {}
    return DatasetManifest(layout=layout, columns=fields, splits={}, tokenizer=facts, settings={})


def _describe_memory(settings: TrainSettings, module: nn.Module) -> dict[str, Any]:
    """Return the memory of the process that holds most, in gigabytes, and the strategy."""
    size, precision = count_processes(settings), _find_precision(settings)
    if precision is None:
        return {"memory_gb_per_process": "unknown: execution.precision depends on the device"}
    strategy = settings.strategy or default_strategy(size)
    parts = estimate_bytes(settings.optimizer, module, strategy, size, precision_dtype(precision))
    parts["total"] = sum(parts.values())
    gigabytes = {name: round(count / GIGA, 6) for name, count in parts.items()}
    noun = "process" if size == 1 else "processes"
    summary = f"{strategy.kind} on {size} {noun}, in {precision}"
    return {"strategy": summary, "memory_gb_per_process": gigabytes}


def estimate_bytes(
    settings: Optimizer, module: nn.Module, strategy: Strategy, size: int, dtype: torch.dtype
) -> dict[str, int]:
    """Return the bytes of the process that holds most, of `size`; activations are not included."""
    weights = {
        name: ParamSpec(tuple(value.shape), value.requires_grad)
        for name, value in module.named_parameters()
    }
    estimate = strategy.estimate_memory(weights, size, dtype.itemsize)
    return {
        "weights": estimate.weights,
        "master_weights": estimate.master_weights,
        "gradients": estimate.gradients,
        "optimizer_state": BYTES_PER_MOMENT * count_moments(settings, estimate.updated_shapes),
    }


def count_processes(settings: TrainSettings) -> int:
    """Return the number of processes of a run on all of its machines."""
    execution = settings.execution
    local_size = count_local_processes(execution.processes, settings.accelerator)
    topology = resolve_topology(execution.nodes, Path(settings.output.folder))
    return local_size * (topology.max_nodes if topology else 1)


def _find_precision(settings: TrainSettings) -> str | None:
    """Return the precision of a run; None if it depends on a device that is not available here."""
    if settings.execution.precision != "auto":
        return settings.execution.precision
    accelerator = settings.accelerator or accelerators.choose()[0]
    return accelerator.precisions()[0] if accelerator.available().fitness else None


def count_moments(settings: Optimizer, shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the number of moment values that an optimizer keeps for weights of these shapes."""
    moment_axes = {rank: _find_moment_axes(settings, PROBE_SHAPE[:rank]) for rank in (1, 2)}
    flat = ((math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else shape for shape in shapes)
    return sum(
        math.prod(shape[axis] for axis in axes)
        for shape in flat
        for axes in moment_axes[len(shape)]
    )


def _find_moment_axes(settings: Optimizer, shape: tuple[int, ...]) -> list[list[int]]:
    """Return the axes of a weight of this shape that each of its moments has."""
    weight = torch.nn.Parameter(torch.zeros(shape))
    optimizer = build_optimizer(settings, {"probe": weight}.items())
    prime_state(optimizer)
    moments = state_tensors(optimizer, {"probe": weight}).values()
    return [[shape.index(size) for size in value.shape if size in shape] for value in moments]


def estimate_row_bytes(
    settings: TrainSettings, dataset: Dataset, module: TextModule, dtype: torch.dtype
) -> int:
    """Return the bytes of activations that are saved for one row.

    The module is on the meta device and cannot be used afterwards. With activation checkpointing
    these are the inputs of all blocks, and the activations inside of one block.
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
    """Return the bytes that autograd saves in a forward pass, weights excluded."""
    sizes: dict[int, int] = {}  # bytes by storage; storages on the meta device have no address
    storages = []

    def record_storage(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        storages.append(storage)  # keep it alive, so that its key stays unique
        sizes[storage._cdata] = storage.nbytes()  # noqa: SLF001 - no public key of a storage
        return value

    with saved_tensors_hooks(record_storage, lambda value: value):
        outputs = module(batch)
    weights = {value.untyped_storage()._cdata for value in module.parameters()}  # noqa: SLF001
    del outputs
    return sum(size for key, size in sizes.items() if key not in weights)
