"""What stays the same during an attempt of a run, on this process.

`RunContext` holds how and on what a run is computed. `state.TrainState` holds what training
changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from regauge.accelerators import Accelerator
    from regauge.data.batches import Arrays
    from regauge.supervision.channel import WorkerReporter
    from regauge.system.hooks import Hooks
    from regauge.system.processes import World
    from regauge.training.checkpoint.saver import Saver
    from regauge.training.compile.cache import CacheEntry
    from regauge.training.heldout import HeldoutSet
    from regauge.training.ledger import Ledger
    from regauge.training.metrics import MetricsWindow, MfuMeter
    from regauge.training.settings import TrainSettings
    from regauge.training.task_runtime import TaskRuntime
    from regauge.training.task_schedule import TaskSchedule


class BatchShape(NamedTuple):
    """The batches of one length of one task."""

    task: TaskRuntime
    length: int
    """Tokens of a row, padding included."""


@dataclass(frozen=True)
class RunContext:
    """The settings, the process and the parts of a run that its steps use."""

    settings: TrainSettings
    """Every choice is resolved."""
    world: World
    accelerator: Accelerator
    device: torch.device
    tasks: tuple[TaskRuntime, ...]
    """The tasks, in the order of the settings."""
    task_schedule: TaskSchedule
    hooks: Hooks
    ledger: Ledger
    metrics: MetricsWindow
    mfu: MfuMeter
    saver: Saver
    cache: CacheEntry | None
    """The cache entry of the compiled graphs, if the run has a cache."""
    reporter: WorkerReporter
    end_microbatch: Callable[[], None]
    """Called after each microbatch."""

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.settings.output.folder)

    @property
    def steps_per_epoch(self) -> int:
        """The steps of one pass over the rows of the first task."""
        return self.task_schedule.steps_per_epoch(self.tasks[0].order.steps_per_epoch)

    @property
    def total_steps(self) -> int:
        """The length of the run in steps."""
        return self.settings.stop.total_steps(self.steps_per_epoch)

    @property
    def shapes(self) -> tuple[BatchShape, ...]:
        """Every shape that training batches have."""
        return tuple(
            BatchShape(task, length) for task in self.tasks for length in task.bucket_lengths
        )

    def pack_batches(self) -> None:
        """Pack the texts of training batches if no graph is compiled for their shapes.

        Evaluations keep the declared lengths, so that the last bits of an output do not depend on
        the other texts of its batch.
        """
        if self.accelerator.has_dynamic_shapes and self.settings.execution.compile == "off":
            for task in self.tasks:
                if task.can_pack:
                    task.loader.pack_texts()

    @property
    def heldout(self) -> dict[str, HeldoutSet]:
        """The held-out sets by the prefix of their metrics, such as `heldout`; may be empty."""
        return {prefix: rows for task in self.tasks for prefix, rows in task.heldout.items()}

    def task_at(self, step: int) -> TaskRuntime:
        """Return the task that a step trains."""
        return self.tasks[self.task_schedule.task_at(step).task]

    def read_batches(self, step: int) -> list[Arrays]:
        """Return the batches of a step for this process, as arrays."""
        number, task_step = self.task_schedule.task_at(step)
        task = self.tasks[number]
        rows = task.order.batch(task_step, self.hooks.row_offset(step))
        return task.loader.load_batches(rows, epoch=task.order.epoch(task_step), step=step)

    def seal_cache(self, seconds: float = 0.0) -> float:
        """List the compiled graphs in their cache entry; return the seconds that they once took."""
        return self.cache.seal(seconds) if self.cache else 0.0
