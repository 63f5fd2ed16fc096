"""Which of a run's tasks a step trains, and on which of their rows; no torch here.

Both are functions of the step alone, so that a run that goes on takes the turns that are left.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, NamedTuple

from regauge.config import first_difference
from regauge.data import mixing
from regauge.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.data.shards import Manifest
    from regauge.training.settings import Training


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
        manifest = mixing.manifest_of(aim.data)
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
