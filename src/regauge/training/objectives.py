"""The tasks of a run where they are computed: each with its rows, its batches and its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.data import mixture
from regauge.data.loader import Facts, Feed, Share
from regauge.data.row_order import sample
from regauge.models import multitask
from regauge.models.flops import flops_per_token
from regauge.models.init_weights import META
from regauge.training.gradients import GradientComputer
from regauge.training.heldout import HeldoutSet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from regauge.accelerators import Accelerator
    from regauge.data.dataset import Dataset, Manifest
    from regauge.data.row_order import Order
    from regauge.models.modules import TextModule
    from regauge.processes import World
    from regauge.strategies import ShardedModel
    from regauge.tasks import Task
    from regauge.training.settings import Batch, TaskConfig, Training


@dataclass(frozen=True)
class TaskRuntime:
    """A task of a run, and all that its steps need."""

    name: str
    """Empty where the run has one task."""
    task: Task
    batch: Batch
    manifest: Manifest
    ladder: tuple[int, ...]
    order: Order
    feed: Feed
    gradients: GradientComputer
    heldout: dict[str, HeldoutSet]
    """What is measured, by the beginning of its metrics' names; empty where nothing is."""
    flops_per_token: float


@dataclass(frozen=True)
class Placement:
    """Where objectives are computed."""

    world: World
    device: torch.device
    accelerator: Accelerator
    mark: Callable[[], None]
    """Ends a batch."""
    arrive: Callable[[], None]
    """Comes before this process may wait for others."""


def build_module(
    settings: Training, manifests: Sequence[Manifest]
) -> TextModule | multitask.MultiTaskModel:
    """Return the module of a run's tasks on the meta device; `manifests` are those of each."""
    with META:
        found = {
            aim.name: aim.task.module(settings.model, manifest, settings.seed)
            for aim, manifest in zip(settings.task_configs, manifests, strict=True)
        }
        return multitask.combine(found)


def build_task_runtime(
    settings: Training, aim: TaskConfig, dataset: Dataset, prepared: ShardedModel, place: Placement
) -> TaskRuntime:
    """Return a task of a run, on the module that was prepared for all of them."""
    manifest, task, batch = dataset.manifest, aim.task, aim.batch
    ladder = task.ladder(manifest)
    given: dict[str, Any] = {"world": place.world, "ladder": ladder, "seed": settings.seed}
    slots = batch.rows * task.slots_per_row()
    return TaskRuntime(
        name=aim.name,
        task=task,
        batch=batch,
        manifest=manifest,
        ladder=ladder,
        order=mixture.order(aim.data, manifest, batch.rows, settings.seed),
        feed=build_feed(task, dataset, "train", rows=batch.microbatch, **given),
        gradients=GradientComputer(task, prepared, place.mark, slots, place.arrive, name=aim.name),
        heldout=_heldout(settings, aim, dataset, place),
        flops_per_token=flops_per_token(
            multitask.modules_by_task(prepared.module)[aim.name].model, ladder[-1]
        ),
    )


def _heldout(
    settings: Training, aim: TaskConfig, dataset: Dataset, place: Placement
) -> dict[str, HeldoutSet]:
    """Return what is held out of a task's datasets, by the beginning of its metrics' names."""
    rows = settings.evaluation.microbatch_rows or aim.batch.microbatch
    ladder = aim.task.ladder(dataset.manifest)
    given: dict[str, Any] = {"world": place.world, "ladder": ladder, "seed": settings.seed}
    found: dict[str, HeldoutSet] = {}
    for name, part in dataset.heldout().items():
        own = build_feed(aim.task, part, "heldout", rows=rows, **given)
        if len(own):
            numbers = sample(len(own), settings.evaluation.rows, part.manifest.identity)
            split = ".".join(word for word in ("heldout", aim.name, name) if word)
            found[split] = HeldoutSet(
                aim.task, place.accelerator, place.mark, place.device, own, numbers, aim.name, name
            )
    return found


def build_feed(
    task: Task,
    dataset: Dataset,
    split: str,
    *,
    world: World,
    rows: int,
    ladder: tuple[int, ...],
    seed: int,
) -> Feed:
    """Return the batches of a split for this process, `rows` rows a microbatch."""
    facts = dataset.manifest.tokenizer
    members = max(field.members for field in dataset.manifest.fields.values())
    return Feed(
        task,
        dataset.split(split),
        facts=Facts(facts.vocabulary, facts.pad, facts.mask, facts.special, members),
        microbatch_rows=rows,
        ladder=ladder,
        share=Share(world.rank, world.size),
        seed=seed,
    )
