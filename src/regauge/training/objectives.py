"""The tasks of a run where they are computed: each with its rows, its batches and its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.data import mixing
from regauge.data.loader import Facts, Feed, Share
from regauge.data.order import sample
from regauge.models import several
from regauge.models.counting import flops_per_token
from regauge.models.initial import META
from regauge.training.scoring import Heldout
from regauge.training.step import Gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from regauge.accelerators import Accelerator
    from regauge.data.order import Order
    from regauge.data.shards import Dataset, Manifest
    from regauge.models.text import TextModule
    from regauge.processes import World
    from regauge.strategies import Prepared
    from regauge.tasks import Task
    from regauge.training.settings import Aim, Batch, Training


@dataclass(frozen=True)
class Objective:
    """A task of a run, and all that its steps need."""

    name: str
    """Empty where the run has one task."""
    task: Task
    batch: Batch
    manifest: Manifest
    ladder: tuple[int, ...]
    order: Order
    feed: Feed
    gradients: Gradients
    heldout: dict[str, Heldout]
    """What is measured, by the beginning of its metrics' names; empty where nothing is."""
    flops_per_token: float


@dataclass(frozen=True)
class Place:
    """Where objectives are computed."""

    world: World
    device: torch.device
    accelerator: Accelerator
    mark: Callable[[], None]
    """Ends a batch."""
    arrive: Callable[[], None]
    """Comes before this process may wait for others."""


def made(settings: Training, manifests: Sequence[Manifest]) -> TextModule | several.Several:
    """Return the module of a run's tasks on the meta device; `manifests` are those of each."""
    with META:
        found = {
            aim.name: aim.task.module(settings.model, manifest, settings.seed)
            for aim, manifest in zip(settings.aims, manifests, strict=True)
        }
        return several.together(found)


def objective(
    settings: Training, aim: Aim, dataset: Dataset, prepared: Prepared, place: Place
) -> Objective:
    """Return a task of a run, on the module that was prepared for all of them."""
    manifest, task, batch = dataset.manifest, aim.task, aim.batch
    ladder = task.ladder(manifest)
    given: dict[str, Any] = {"world": place.world, "ladder": ladder, "seed": settings.seed}
    slots = batch.rows * task.slots_per_row()
    return Objective(
        name=aim.name,
        task=task,
        batch=batch,
        manifest=manifest,
        ladder=ladder,
        order=mixing.order(aim.data, manifest, batch.rows, settings.seed),
        feed=feed(task, dataset, "train", rows=batch.microbatch, **given),
        gradients=Gradients(task, prepared, place.mark, slots, place.arrive, name=aim.name),
        heldout=_heldout(settings, aim, dataset, place),
        flops_per_token=flops_per_token(several.parts(prepared.module)[aim.name].model, ladder[-1]),
    )


def _heldout(settings: Training, aim: Aim, dataset: Dataset, place: Place) -> dict[str, Heldout]:
    """Return what is held out of a task's datasets, by the beginning of its metrics' names."""
    rows = settings.evaluation.microbatch_rows or aim.batch.microbatch
    ladder = aim.task.ladder(dataset.manifest)
    given: dict[str, Any] = {"world": place.world, "ladder": ladder, "seed": settings.seed}
    found: dict[str, Heldout] = {}
    for name, part in dataset.heldout().items():
        own = feed(aim.task, part, "heldout", rows=rows, **given)
        if len(own):
            numbers = sample(len(own), settings.evaluation.rows, part.manifest.identity)
            split = ".".join(word for word in ("heldout", aim.name, name) if word)
            found[split] = Heldout(
                aim.task, place.accelerator, place.mark, place.device, own, numbers, aim.name, name
            )
    return found


def feed(
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
