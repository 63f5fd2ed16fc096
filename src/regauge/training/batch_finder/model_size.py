"""Model parameters, FLOPs and memory for `--dry-run`.

Weights, master weights, gradients and moments follow from the strategy. Models listed in
`models/weight_shapes.py` are counted without torch, all others on torch's meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.data.dataset import DatasetManifest, assume_manifest, read_manifest
from regauge.data.unprepared import NO_ROWS, expected_fields, find_rows, is_prepared
from regauge.models.flops import FLOPS_FORMULA, ParameterCounts, compute_flops
from regauge.models.weight_shapes import ParamSpec, count_elements, list_new_weights
from regauge.supervision.nodes.topology import resolve_topology
from regauge.system.units import GIGA
from regauge.training.defaults import count_local_processes, default_strategy, find_accelerator
from regauge.training.state_bytes import RunWeights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from regauge.data.unprepared import RowsByFolder
    from regauge.models.io_spec import ModelHead
    from regauge.models.weight_shapes import ModelWeights
    from regauge.tasks import Task
    from regauge.training.settings import TaskConfig, TrainSettings


class TaskSize(NamedTuple):
    """A task's row limit and FLOPs."""

    max_tokens: int | None
    flops_per_token: Callable[[int], float]
    """Row length -> training FLOPs per token."""


class ModelSize(NamedTuple):
    """The model's weights, and per-task sizes."""

    counts: ParameterCounts
    weights: Mapping[str, ParamSpec]
    tasks: Mapping[str, TaskSize]
    """Task name -> size; a single task has the name `""`."""


def describe_model(settings: TrainSettings, described: RowsByFolder = NO_ROWS) -> dict[str, Any]:
    """Return the model's parameters, FLOPs per token, and memory per process.

    `described` holds `[rows]` tables for datasets that are not prepared yet. Raises SettingsError
    if the model cannot be built.
    """
    manifests = [_find_manifest(config, described) for config in settings.task_configs]
    size = count_weights(settings, manifests)
    if size is None:
        from regauge.training.batch_finder.memory import measure_module

        size = measure_module(settings, manifests)
    counts = size.counts
    description: dict[str, Any] = {
        "parameters": counts.all,
        **{f"{name}_parameters": count for name, count in asdict(counts).items() if name != "all"},
    }
    for config, manifest in zip(settings.task_configs, manifests, strict=True):
        if assumption := config.task.find_assumption(manifest):
            description[f"assumed_{config.name}" if config.name else "assumed"] = assumption
        task = size.tasks[config.name]
        length, source = _find_row_length(config, manifest, task.max_tokens)
        if length is not None:
            suffix = f"_{config.name}" if config.name else ""
            description |= {f"row_length{suffix}": length, f"row_length_source{suffix}": source}
            description[f"flops_per_token{suffix}"] = task.flops_per_token(length)
            description[f"flops_formula{suffix}"] = f"{FLOPS_FORMULA}; S = {length}"
    return {**description, **_describe_memory(settings, size.weights)}


def count_weights(
    settings: TrainSettings, manifests: Sequence[DatasetManifest]
) -> ModelSize | None:
    """Return the model size without torch; None if the model must be built to know it."""
    if len(settings.task_configs) > 1:
        return None
    (config,), (manifest,) = settings.task_configs, manifests
    head = _find_head(config.task, manifest)
    tokenizer = manifest.tokenizer
    weights = head and list_new_weights(
        settings.model, head, tokenizer.vocab_size, tokenizer.pad_token_id
    )
    return _summarize(weights, config.name) if weights else None


def _find_head(task: Task, manifest: DatasetManifest) -> ModelHead | None:
    """Return the task's head; None for a class that overrides only `build_module`."""
    names = ("head", "find_head", "build_module")
    *heads, module = (
        next(kind for kind in type(task).__mro__ if name in vars(kind)) for name in names
    )
    has_head = any(issubclass(head, module) for head in heads)
    return task.find_head(manifest) if has_head else None


def _summarize(weights: ModelWeights, task: str) -> ModelSize:
    layers, width = weights.sizes.layers, weights.sizes.width
    total = count_elements(weights.shapes)
    matrices = {name: shape for name, shape in weights.block.items() if len(shape) > 1}
    matmul = layers * count_elements(matrices)
    counts = ParameterCounts(
        all=total,
        trained=total,
        embedding=count_elements(weights.tables),
        blocks=layers * count_elements(weights.block),
        matmul=matmul,
    )

    def count_flops(length: int) -> float:
        return compute_flops(matmul, matmul, layers * width * length)

    specs = {
        f"model.{name}": ParamSpec(shape, requires_grad=True)
        for name, shape in weights.shapes.items()
    }
    return ModelSize(counts, specs, {task: TaskSize(weights.max_tokens, count_flops)})


def _find_row_length(
    config: TaskConfig, manifest: DatasetManifest, max_tokens: int | None
) -> tuple[int | None, str]:
    """Return the longest row in tokens, and where this length comes from."""
    dataset = config.data.path
    if not manifest.columns:
        return max_tokens, f"assumed: the maximum of the model, no [rows] table is for {dataset}"
    source = "the prepared data" if is_prepared(Path(dataset)) else "[rows] of the run file"
    return config.task.bucket_lengths(manifest)[-1], source


def _find_manifest(config: TaskConfig, described: RowsByFolder) -> DatasetManifest:
    """Return the dataset's manifest, or an empty one with a tokenizer that suits every model.

    An empty manifest has the fields of the `[rows]` table, if the table has the task's layout.
    """
    if is_prepared(Path(config.data.path)):
        return read_manifest(Path(config.data.path))
    layout, rows = config.task.row_layout(), find_rows(described, config.data.path)
    fields = expected_fields(rows) if rows and rows.layout == layout else {}
    return assume_manifest(layout, fields)


def _describe_memory(settings: TrainSettings, weights: Mapping[str, ParamSpec]) -> dict[str, Any]:
    """Return the strategy, and the gigabytes of the process that holds most."""
    size, precision = count_processes(settings), _find_precision(settings)
    if precision is None:
        return {"memory_gb_per_process": "unknown: execution.precision depends on the device"}
    strategy = settings.strategy or default_strategy(size)
    states = RunWeights(weights, settings.optimizer.kind).measure(strategy, size, precision)
    parts = states._asdict() | {"total": sum(states)}
    gigabytes = {name: round(count / GIGA, 6) for name, count in parts.items()}
    noun = "process" if size == 1 else "processes"
    summary = f"{strategy.kind} on {size} {noun}, in {precision}"
    return {"strategy": summary, "memory_gb_per_process": gigabytes}


def count_processes(settings: TrainSettings) -> int:
    """Return the run's process count over all machines."""
    execution = settings.execution
    local_size = count_local_processes(execution.processes, settings.accelerator)
    topology = resolve_topology(execution.nodes, Path(settings.output.folder))
    return local_size * (topology.max_nodes if topology else 1)


def _find_precision(settings: TrainSettings) -> str | None:
    """Return the precision; None if it depends on a device that is not available here."""
    if settings.execution.precision != "auto":
        return settings.execution.precision
    accelerator = find_accelerator(settings)
    return accelerator.precisions()[0] if accelerator.available().fitness else None
