"""Evaluates a module on held-out rows: one path for the training loop and for `evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regauge import stop_signals
from regauge.data.batches import TEXT_HASHES
from regauge.models.multitask import set_active_task
from regauge.tasks import ITEMS
from regauge.training.gradients import all_reduce_sum, gather_by_slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy as np
    from torch import nn

    from regauge.accelerators import Accelerator, Batch
    from regauge.data.loader import BatchLoader
    from regauge.tasks import MetricSums, Task


GATHERED = ("slots", "real", TEXT_HASHES)
"""The arrays of a batch that metrics over all rows need."""


@dataclass(frozen=True)
class HeldoutSet:
    """The held-out rows of a dataset, and the parts that evaluate a module on them."""

    task: Task
    accelerator: Accelerator
    end_microbatch: Callable[[], None]
    """Called after each microbatch."""
    device: torch.device
    loader: BatchLoader
    row_numbers: np.ndarray
    """The sampled rows of the split, in the order of the outputs."""
    task_name: str = ""
    """The name of the task; empty if the run has one task."""
    dataset_name: str = ""
    """The name of a dataset that is mixed in; empty for the main dataset of the task."""

    def compute_metrics(self, module: nn.Module) -> dict[str, float]:
        """Return the metrics of a module; every process gets the same values."""
        return self.evaluate(module)[0]

    def evaluate(self, module: nn.Module) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Return the metrics and the outputs of a module.

        Only tasks with `metrics_need_all_rows` return outputs, in the order of the rows.
        """
        set_active_task(module, self.task_name)
        batches, rows = self.read_batches()
        num_slots = rows * self.task.slots_per_row()
        return evaluate_batches(self.task, module, batches, num_slots, self.end_microbatch)

    def read_batches(self) -> tuple[Iterator[Batch], int]:
        """Return the batches of this process on the device, and the row count with padding."""
        arrays, rows = self.loader.load_evaluation_batches(self.row_numbers)
        host = (
            [{name: torch.from_numpy(value) for name, value in batch.items()}] for batch in arrays
        )
        return (batch for (batch,) in self.accelerator.wrap_loader(host, self.device)), rows


def evaluate_batches(
    task: Task,
    module: nn.Module,
    batches: Iterable[Batch],
    num_slots: int,
    end_microbatch: Callable[[], None],
) -> tuple[dict[str, float], Batch]:
    """Return the metrics over the batches of all processes, and the outputs.

    Sums are exact and count each row once; means are taken at the end. Every process gets the same
    values. Outputs are in slot order if the task has `metrics_need_all_rows`, else empty.

    `num_slots` is the number of sequences in the batches of all processes, padding included.
    `end_microbatch` is called after each batch.
    """
    module.eval()
    tables: list[Tensor] = []
    vectors: list[Tensor] = []
    slots: list[Batch] = []
    names: list[str] = []
    with torch.no_grad():
        for batch in batches:
            stop_signals.check_stop()
            output = module(batch)
            if task.metrics_need_all_rows:
                vectors.append(task.eval_outputs(output, batch))
                slots.append({name: batch[name] for name in GATHERED if name in batch})
            else:
                names, table = _build_table(task.metric_sums(output, batch))
                tables.append(table)
            end_microbatch()
        if task.metrics_need_all_rows:
            outputs = gather_by_slot(vectors, slots, num_slots)
            names, table = _build_table(task.metric_sums(outputs, outputs))
            end_microbatch()
            return _divide(names, table.cpu()), outputs
        device = tables[0].device
        total = torch.stack([table.cpu() for table in tables]).double().sum(0).float()
    return _divide(names, all_reduce_sum(total.to(device)).cpu()), {}


def compute_means(sums: MetricSums) -> dict[str, float]:
    """Return the mean of each metric, and the number of items; the device is read once."""
    names, table = _build_table(sums)
    return _divide(names, table.cpu())


def _build_table(sums: MetricSums) -> tuple[list[str], Tensor]:
    """Return the names of metrics, and a table [metrics, 2] of their sums and weights."""
    rows = [torch.stack([total.float(), weight.float()]) for total, weight in sums.values()]
    return list(sums), torch.stack(rows)


def _divide(names: list[str], table: Tensor) -> dict[str, float]:
    """Return each sum divided by its weight, and the weight of the first metric as `items`."""
    rows = table.tolist()
    pairs = zip(names, rows, strict=True)
    means = {name: total / max(weight, 1e-9) for name, (total, weight) in pairs}
    return means | {ITEMS: rows[0][1]}
