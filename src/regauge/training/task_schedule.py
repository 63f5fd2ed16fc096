"""Which task a step trains, and what identifies the tasks' data; this module needs no torch.

A step's task is a function of the step alone, so a resumed run continues in the middle of a
cycle.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from regauge.config import describe_first_difference
from regauge.data import mixture
from regauge.data.dataset import TOKENIZER
from regauge.data.tokenizer import LoadedTokenizer
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.data.dataset import DatasetManifest
    from regauge.training.settings import TrainSettings


class ScheduledTask(NamedTuple):
    """The task trained in a step."""

    task: int
    step: int
    """Steps that the task has had before."""


class TaskSchedule:
    """Round-robin task sampling by weights.

    Of every `sum(weights)` steps a task gets as many as its weight, spread evenly: a step goes to
    the task that is furthest behind, and among equals to the first.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = tuple(weights)
        cycle = sum(weights)
        counts = [0] * len(weights)
        self._cycle: list[ScheduledTask] = []
        for position in range(1, cycle + 1):
            deficits = [
                weight * position - cycle * count
                for weight, count in zip(weights, counts, strict=True)
            ]
            task = deficits.index(max(deficits))
            self._cycle.append(ScheduledTask(task, counts[task]))
            counts[task] += 1

    def task_at(self, step: int) -> ScheduledTask:
        cycles, position = divmod(step, len(self._cycle))
        task, before = self._cycle[position]
        return ScheduledTask(task, cycles * self.weights[task] + before)

    def mean(self, values: Sequence[float]) -> float:
        """Return the mean of the tasks' values over all steps."""
        pairs = zip(self.weights, values, strict=True)
        return sum(weight * value for weight, value in pairs) / sum(self.weights)

    def steps_per_epoch(self, first_task_steps: int) -> int:
        """Return how many steps the run takes until the first task has done `first_task_steps`."""
        return math.ceil(first_task_steps * len(self._cycle) / self.weights[0])


def read_manifests(settings: TrainSettings) -> list[DatasetManifest]:
    """Read the manifest of each task's dataset.

    Raises DataError if a task cannot train on its dataset, or if the tokenizers differ.
    """
    manifests = []
    for config in settings.task_configs:
        manifest = mixture.read_data_manifest(config.data)
        config.task.check_dataset(manifest)
        _check_special_tokens(Path(config.data.path), manifest)
        manifests.append(manifest)
    ours = manifests[0].tokenizer.model_dump()
    for config, manifest in zip(settings.task_configs, manifests, strict=True):
        theirs = manifest.tokenizer.model_dump()
        if theirs != ours:
            difference = describe_first_difference("tokenizer", ours, theirs)
            first = settings.task_configs[0].data.path
            raise DataError(
                f"{config.data.path} and {first} have different tokenizers: {difference}",
                f"prepare it again with tokenizer.path = the tokenizer of {first}",
            )
    return manifests


def resolve_tasks(settings: TrainSettings, manifests: Sequence[DatasetManifest]) -> TrainSettings:
    """Fill task settings with dataset defaults, such as class names."""
    configs = settings.task_configs
    tasks = [
        config.task.resolve_defaults(manifest)
        for config, manifest in zip(configs, manifests, strict=True)
    ]
    if not isinstance(settings.task, tuple):
        return settings.model_copy(update={"task": tasks[0]})
    entries = tuple(
        entry.model_copy(update={"task": task})
        for entry, task in zip(settings.task, tasks, strict=True)
    )
    return settings.model_copy(update={"task": entries})


def _check_special_tokens(dataset: Path, manifest: DatasetManifest) -> None:
    """Raise DataError if an older version put a dataset's special tokens elsewhere."""
    folder = dataset / "tokenizer"
    if manifest.special_tokens == "guessed" and (folder / TOKENIZER).is_file():
        LoadedTokenizer(folder).check_guessed(dataset, "prepare the data again")


def count_steps_per_epoch(settings: TrainSettings, manifest: DatasetManifest) -> int:
    """Return the steps in which the first task has one pass over its rows.

    `manifest` belongs to the first task's dataset.
    """
    configs = settings.task_configs
    rows = configs[0].batch.rows
    order = mixture.build_row_order(configs[0].data, manifest, rows, settings.seed)
    schedule = TaskSchedule([config.weight for config in configs])
    return schedule.steps_per_epoch(order.steps_per_epoch)


def count_total_steps(settings: TrainSettings) -> int:
    """Return the run length in steps; reads the dataset only if the length is in epochs."""
    if settings.stop.steps is not None:
        return settings.stop.steps
    manifest = mixture.read_data_manifest(settings.task_configs[0].data)
    return settings.stop.total_steps(count_steps_per_epoch(settings, manifest))


def data_fingerprint(manifests: Sequence[DatasetManifest]) -> str:
    """Hash all training rows and their order."""
    if len(manifests) == 1:
        return manifests[0].fingerprint
    identities = " ".join(manifest.fingerprint for manifest in manifests)
    return hashlib.sha256(identities.encode()).hexdigest()
