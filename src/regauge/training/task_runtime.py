"""Builds each task's parts: row order, batches, gradients and held-out sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.data import mixture
from regauge.data.loader import build_loader
from regauge.data.row_order import sample_rows
from regauge.models import multitask
from regauge.models.flops import flops_per_token
from regauge.models.heads import check_trained
from regauge.models.init_weights import META
from regauge.training.gradients import GradientComputer
from regauge.training.heldout import HeldoutSet, load_custom_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from regauge.accelerators import Accelerator
    from regauge.data.dataset import Dataset, DatasetManifest
    from regauge.data.loader import BatchLoader
    from regauge.data.row_order import RowOrder
    from regauge.models.modules import TextModule
    from regauge.system.processes import World
    from regauge.tasks import Task
    from regauge.training.settings import Batch, TaskConfig, TrainSettings
    from regauge.training.strategies import ShardedModel


@dataclass(frozen=True)
class TaskRuntime:
    """A task, with the parts that its steps need."""

    name: str
    """Empty if the run has one task."""
    task: Task
    batch: Batch
    manifest: DatasetManifest
    bucket_lengths: tuple[int, ...]
    """Training batch lengths in tokens, ascending."""
    order: RowOrder
    loader: BatchLoader
    gradients: GradientComputer
    heldout: dict[str, HeldoutSet]
    """Metric prefix, such as `heldout` -> held-out set; may be empty."""
    flops_per_token: float
    can_pack: bool
    """Whether the module computes texts in packed rows, if batches may have any shape."""


@dataclass(frozen=True)
class DeviceContext:
    """Process and device for computing tasks."""

    world: World
    device: torch.device
    accelerator: Accelerator
    end_microbatch: Callable[[], None]
    """Called after each microbatch."""
    before_collective: Callable[[], None]
    """Called before this process may wait for other processes."""


def build_module(
    settings: TrainSettings, manifests: Sequence[DatasetManifest]
) -> TextModule | multitask.MultiTaskModel:
    """Build the module for all tasks, on the meta device.

    `manifests` are the dataset manifests, in task order. Raises SettingsError if no weight is
    trained, or if no weight of a custom module can be frozen.
    """
    with META:
        modules = {
            config.name: config.task.build_module(settings.model, manifest, settings.seed)
            for config, manifest in zip(settings.task_configs, manifests, strict=True)
        }
        module = multitask.combine_modules(modules)
    check_trained(module, settings.model.trainable_layers)
    return module


def build_task_runtime(
    settings: TrainSettings,
    config: TaskConfig,
    dataset: Dataset,
    model: ShardedModel,
    device_context: DeviceContext,
) -> TaskRuntime:
    config = config._replace(task=config.task.resolve_defaults(dataset.manifest))
    manifest, task, batch = dataset.manifest, config.task, config.batch
    bucket_lengths = task.bucket_lengths(manifest)
    loader = build_loader(
        task,
        dataset,
        "train",
        world=device_context.world,
        rows=batch.microbatch,
        bucket_lengths=bucket_lengths,
        seed=settings.seed,
    )
    gradients = GradientComputer(
        task,
        model,
        device_context.end_microbatch,
        batch.rows * task.slots_per_row(),
        device_context.before_collective,
        task_name=config.name,
    )
    module = multitask.modules_by_task(model.module)[config.name]
    return TaskRuntime(
        name=config.name,
        task=task,
        batch=batch,
        manifest=manifest,
        bucket_lengths=bucket_lengths,
        order=mixture.build_row_order(config.data, manifest, batch.rows, settings.seed),
        loader=loader,
        gradients=gradients,
        heldout=_build_heldout_sets(settings, config, dataset, device_context),
        flops_per_token=flops_per_token(module.model, bucket_lengths[-1]),
        can_pack=module.can_pack,
    )


def _build_heldout_sets(
    settings: TrainSettings, config: TaskConfig, dataset: Dataset, device_context: DeviceContext
) -> dict[str, HeldoutSet]:
    """Metric prefix -> held-out set, for a task's datasets."""
    heldout_sets: dict[str, HeldoutSet] = {}
    for name, heldout_dataset in dataset.heldout_sets().items():
        loader = build_loader(
            config.task,
            heldout_dataset,
            "heldout",
            world=device_context.world,
            rows=settings.evaluation.microbatch_rows or config.batch.microbatch,
            bucket_lengths=config.task.bucket_lengths(dataset.manifest),
            seed=settings.seed,
        )
        if not len(loader):
            continue
        identity = heldout_dataset.manifest.fingerprint
        prefix = ".".join(word for word in ("heldout", config.name, name) if word)
        heldout_sets[prefix] = HeldoutSet(
            task=config.task,
            accelerator=device_context.accelerator,
            end_microbatch=device_context.end_microbatch,
            device=device_context.device,
            loader=loader,
            row_numbers=sample_rows(len(loader), settings.evaluation.rows, identity),
            task_name=config.name,
            dataset_name=name,
            custom_metrics=load_custom_metrics(settings.evaluation.metrics),
        )
    return heldout_sets
