"""The measurement on held-out rows: the same path in the loop and after it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from regauge import lines
from regauge.log import logger
from regauge.models.several import turn_to
from regauge.training.samples import FILE, samples
from regauge.training.step import score

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from torch import nn

    from regauge.accelerators import Accelerator
    from regauge.data.loader import Feed
    from regauge.tasks import Task
    from regauge.training.session import Session


SHOWN = 60
"""Letters of a prompt and of its answer that a line of the log has."""


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
    of: str = ""
    """Name of the task; empty where there is one."""
    part: str = ""
    """Name of the dataset; empty for the task's own."""

    def metrics(self, module: nn.Module) -> dict[str, float]:
        """Return the metrics of a module, equal on every process."""
        return self.outputs(module)[0]

    def outputs(self, module: nn.Module) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Return the metrics, and what a `whole` task keeps, in the order of the rows."""
        turn_to(module, self.of)
        arrays, rows = self.feed.once(self.numbers)
        host = (
            [{name: torch.from_numpy(value) for name, value in part.items()}] for part in arrays
        )
        batches = (batch for (batch,) in self.accelerator.wrap_loader(host, self.device))
        slots = rows * self.task.slots_per_row()
        return score(self.task, module, batches, slots, self.mark)


def evaluate(session: Session) -> dict[str, float]:
    """Return the held-out metrics of this moment of a run as `heldout/<metric>`.

    Those of one of several tasks are `heldout.<task>/<metric>`; those of another dataset that is
    mixed in have its name behind that. Empty where no rows are held out.
    """
    found: dict[str, float] = {}
    for split, heldout in session.heldout.items():
        with session.ledger.spend("evaluate"), session.computing():
            session.chaos.strike("evaluate", session.step)
            metrics = heldout.metrics(session.prepared.module)
            if heldout.task.writes and not heldout.part:
                _write_samples(session, heldout)
        found |= {f"{split}/{name}": value for name, value in metrics.items()}
    return found


def _write_samples(session: Session, heldout: Heldout) -> None:
    """Add what the model of this moment answers to samples.jsonl, and say the first one."""
    wanted, data = session.settings.evaluation.samples, Path(session.settings.aims[0].data.path)
    found = samples(heldout, session.prepared.module, wanted, data)
    if not session.world.first or not wanted.prompts:
        return
    for each in found:
        task = {"task": heldout.of} if heldout.of else {}
        document = {"attempt": session.attempt, "step": session.step, **task, **each}
        lines.append(session.folder / FILE, document)
    if found:
        prompt, answer = found[0]["prompt"][-SHOWN:], found[0]["answer"][:SHOWN]
        said = (session.step, len(found), prompt, answer)
        logger.info("step %d: %d prompts are answered, %r with %r", *said)
    else:
        logger.warning("no held-out row has a prompt to go on with: see evaluation.samples")
