"""What stays the same during an attempt, on this process.

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
    """Batch shape of one task and one length."""

    task: TaskRuntime
    length: int
    """Tokens per row, padding included."""


@dataclass(frozen=True)
class RunContext:
    """Settings, process and parts used by the steps of a run."""

    settings: TrainSettings
    """With every choice resolved."""
    world: World
    accelerator: Accelerator
    device: torch.device
    tasks: tuple[TaskRuntime, ...]
    task_schedule: TaskSchedule
    hooks: Hooks
    ledger: Ledger
    metrics: MetricsWindow
    mfu: MfuMeter
    saver: Saver
    cache: CacheEntry | None
    reporter: WorkerReporter
    end_microbatch: Callable[[], None]
    """Called after each microbatch."""

    @property
    def folder(self) -> Path:
        return Path(self.settings.output.folder)

    @property
    def steps_per_epoch(self) -> int:
        """Steps per pass over the first task's rows."""
        return self.task_schedule.steps_per_epoch(self.tasks[0].order.steps_per_epoch)

    @property
    def total_steps(self) -> int:
        return self.settings.stop.total_steps(self.steps_per_epoch)

    @property
    def shapes(self) -> tuple[BatchShape, ...]:
        return tuple(
            BatchShape(task, length) for task in self.tasks for length in task.bucket_lengths
        )

    def pack_batches(self) -> None:
        """Pack the texts in training batches if no graph is compiled for their shapes.

        Evaluations keep the declared lengths, so the last bits of an output do not depend on
        other texts in the batch.
        """
        if self.accelerator.has_dynamic_shapes and self.settings.execution.compile == "off":
            for task in self.tasks:
                if task.can_pack:
                    task.loader.pack_texts()

    @property
    def heldout(self) -> dict[str, HeldoutSet]:
        """Metric prefix, such as `heldout` -> held-out set; may be empty."""
        return {prefix: rows for task in self.tasks for prefix, rows in task.heldout.items()}

    def task_at(self, step: int) -> TaskRuntime:
        return self.tasks[self.task_schedule.task_at(step).task]

    def read_batches(self, step: int) -> list[Arrays]:
        """Return this process's batches for a step, as arrays."""
        number, task_step = self.task_schedule.task_at(step)
        task = self.tasks[number]
        rows = task.order.batch(task_step, self.hooks.row_offset(step))
        return task.loader.load_batches(rows, epoch=task.order.epoch(task_step), step=step)

    def seal_cache(self, seconds: float = 0.0) -> float:
        """List the compiled graphs in their cache entry; return the seconds they once took."""
        return self.cache.seal(seconds) if self.cache else 0.0
