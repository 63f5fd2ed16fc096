"""The tasks of a run where they are computed: each with its rows, its batches and its gradients."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.config import first_difference
from regauge.data import mixture
from regauge.data.loader import Facts, Feed, Share
from regauge.data.row_order import sample
from regauge.errors import DataError
from regauge.models import multitask
from regauge.models.flops import flops_per_token
from regauge.models.init_weights import META
from regauge.training.gradients import Gradients
from regauge.training.heldout import Heldout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from regauge.accelerators import Accelerator
    from regauge.data.dataset import Dataset, Manifest
    from regauge.data.row_order import Order
    from regauge.models.modules import TextModule
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


def made(settings: Training, manifests: Sequence[Manifest]) -> TextModule | multitask.Several:
    """Return the module of a run's tasks on the meta device; `manifests` are those of each."""
    with META:
        found = {
            aim.name: aim.task.module(settings.model, manifest, settings.seed)
            for aim, manifest in zip(settings.aims, manifests, strict=True)
        }
        return multitask.together(found)


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
        order=mixture.order(aim.data, manifest, batch.rows, settings.seed),
        feed=feed(task, dataset, "train", rows=batch.microbatch, **given),
        gradients=Gradients(task, prepared, place.mark, slots, place.arrive, name=aim.name),
        heldout=_heldout(settings, aim, dataset, place),
        flops_per_token=flops_per_token(
            multitask.parts(prepared.module)[aim.name].model, ladder[-1]
        ),
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


class Turn(NamedTuple):
    """Whose step it is."""

    task: int
    """The number of the task, from 0."""
    step: int
    """How many steps that task has had before."""


class Turns:
    """Tasks that take turns by their weights.

    Of every `sum(weights)` steps a task has as many as its weight, spread evenly: at each step the
    one that is furthest behind, of equals the first.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = tuple(weights)
        cycle = sum(weights)
        given = [0] * len(weights)
        self._round: list[Turn] = []
        for place in range(1, cycle + 1):
            behind = [
                weight * place - cycle * count for weight, count in zip(weights, given, strict=True)
            ]
            task = behind.index(max(behind))
            self._round.append(Turn(task, given[task]))
            given[task] += 1

    def at(self, step: int) -> Turn:
        """Return whose step it is, counted from 0."""
        rounds, place = divmod(step, len(self._round))
        task, before = self._round[place]
        return Turn(task, rounds * self.weights[task] + before)

    def steps_per_epoch(self, first: int) -> int:
        """Return how many steps give the first task so many of its own, which are its epoch."""
        return math.ceil(first * len(self._round) / self.weights[0])


def manifests(settings: Training) -> list[Manifest]:
    """Return what each task of a run trains on; raises where it cannot, or not with the others."""
    found = []
    for aim in settings.aims:
        manifest = mixture.manifest_of(aim.data)
        aim.task.check(manifest)
        found.append(manifest)
    ours = found[0].tokenizer.model_dump()
    for aim, manifest in zip(settings.aims, found, strict=True):
        theirs = manifest.tokenizer.model_dump()
        if theirs != ours:
            difference = first_difference("tokenizer", ours, theirs)
            raise DataError(
                f"{aim.data.path} has another tokenizer than {settings.aims[0].data.path}:"
                f" {difference}",
                "prepare it with tokenizer.path = that of the other",
            )
    return found


def identity(found: Sequence[Manifest]) -> str:
    """Return the hash of all rows and their order that a run trains on."""
    if len(found) == 1:
        return found[0].identity
    names = " ".join(manifest.identity for manifest in found)
    return hashlib.sha256(names.encode()).hexdigest()
