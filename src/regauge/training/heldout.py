"""The measurement on held-out rows: the same path in the loop and after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regauge.models.multitask import set_active_task
from regauge.tasks import ITEMS
from regauge.training.gradients import all_reduce_sum, gather_by_slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from torch import nn

    from regauge.accelerators import Accelerator, Batch
    from regauge.data.loader import Feed
    from regauge.tasks import Sums, Task


@dataclass(frozen=True)
class HeldoutSet:
    """The held-out rows of a dataset, ready to measure a prepared module on."""

    task: Task
    accelerator: Accelerator
    mark: Callable[[], None]
    """Ends a batch."""
    device: torch.device
    feed: Feed
    numbers: np.ndarray
    """The rows that stand for the split, in the order of the outputs."""
    of: str = ""
    """Name of the task; empty where there is one."""
    part: str = ""
    """Name of the dataset; empty for the task's own."""

    def metrics(self, module: nn.Module) -> dict[str, float]:
        """Return the metrics of a module, equal on every process."""
        return self.outputs(module)[0]

    def outputs(self, module: nn.Module) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Return the metrics, and what a `whole` task keeps, in the order of the rows."""
        set_active_task(module, self.of)
        arrays, rows = self.feed.once(self.numbers)
        host = (
            [{name: torch.from_numpy(value) for name, value in part.items()}] for part in arrays
        )
        batches = (batch for (batch,) in self.accelerator.wrap_loader(host, self.device))
        slots = rows * self.task.slots_per_row()
        return evaluate_batches(self.task, module, batches, slots, self.mark)


def evaluate_batches(
    task: Task, module: nn.Module, batches: Iterable[Batch], slots: int, mark: Callable[[], None]
) -> tuple[dict[str, float], Batch]:
    """Return the held-out metrics over the batches of all processes, equal on each of them.

    The one evaluation path: exact sums over all rows, each row once, means taken at the end.
    `slots` is the number of places that the batches of all processes fill; what a `whole` task
    keeps comes back in their order, the outputs of another do not. `mark` ends a batch.
    """
    module.eval()
    tables: list[Tensor] = []
    vectors: list[Tensor] = []
    places: list[Batch] = []
    names: list[str] = []
    with torch.no_grad():
        for batch in batches:
            output = module(batch)
            if task.whole:
                vectors.append(task.kept(output, batch))
                places.append({name: batch[name] for name in ("slots", "real")})
            else:
                names, table = _table(task.tally(output, batch))
                tables.append(table)
            mark()
        if task.whole:
            everything = gather_by_slot(vectors, places, slots)
            names, table = _table(task.tally(everything, everything))
            mark()
            return _quotients(names, table.cpu()), everything
        device = tables[0].device
        total = torch.stack([table.cpu() for table in tables]).double().sum(0).float()
    return _quotients(names, all_reduce_sum(total.to(device)).cpu()), {}


def compute_means(sums: Sums) -> dict[str, float]:
    """Return each sum over its weight, and the first weight; one reading of the device."""
    names, table = _table(sums)
    return _quotients(names, table.cpu())


def _table(sums: Sums) -> tuple[list[str], Tensor]:
    """Return the names of metrics, and [metrics, 2] of their sums and weights."""
    rows = [torch.stack([top.float(), weight.float()]) for top, weight in sums.values()]
    return list(sums), torch.stack(rows)


def _quotients(names: list[str], table: Tensor) -> dict[str, float]:
    """Return the means, and how many items they are taken over."""
    rows = table.tolist()
    pairs = zip(names, rows, strict=True)
    return {name: top / max(weight, 1e-9) for name, (top, weight) in pairs} | {ITEMS: rows[0][1]}
