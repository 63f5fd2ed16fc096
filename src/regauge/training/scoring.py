"""The measurement on held-out rows: the same path in the loop and after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from regauge.data.order import sample
from regauge.training.step import score

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from torch import nn

    from regauge.accelerators import Accelerator
    from regauge.data.loader import Feed
    from regauge.tasks import Task
    from regauge.training.session import Session


@dataclass(frozen=True)
class Heldout:
    """The held-out rows of a dataset, ready to measure a prepared module on."""

    task: Task
    accelerator: Accelerator
    mark: Callable[[], None]
    """Ends a batch."""
    device: torch.device
    feed: Feed
    numbers: np.ndarray
    """The rows that stand for the split, in the order of the outputs."""

    def metrics(self, module: nn.Module) -> dict[str, float]:
        """Return the metrics of a module, equal on every process."""
        return self.outputs(module)[0]

    def outputs(self, module: nn.Module) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Return the metrics, and the outputs of a coupled task in the order of the rows."""
        arrays, rows = self.feed.once(self.numbers)
        host = (
            [{name: torch.from_numpy(value) for name, value in part.items()}] for part in arrays
        )
        batches = (batch for (batch,) in self.accelerator.wrap_loader(host, self.device))
        slots = rows * self.task.texts_per_row()
        return score(self.task, module, batches, slots, self.mark)


def evaluate(session: Session) -> dict[str, float]:
    """Return the held-out metrics of this moment of a run as `heldout/<metric>`.

    Empty where no rows are held out.
    """
    settings = session.settings
    if len(session.heldout) == 0:
        return {}
    heldout = Heldout(
        settings.task,
        session.accelerator,
        session.mark,
        session.device,
        session.heldout,
        sample(len(session.heldout), settings.evaluation.rows, session.manifest.identity),
    )
    with session.ledger.spend("evaluate"), session.computing():
        session.chaos.strike("evaluate", session.step)
        found = heldout.metrics(session.prepared.module)
    return {f"heldout/{name}": value for name, value in found.items()}
