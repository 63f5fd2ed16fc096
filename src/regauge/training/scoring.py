"""The measurement on held-out rows: the same path in the loop and after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from regauge.training.step import score

if TYPE_CHECKING:
    from regauge.training.session import Session


def evaluate(session: Session) -> dict[str, float]:
    """Return the held-out metrics as `heldout/<metric>`, equal on every process."""
    settings = session.settings
    with session.ledger.spend("evaluate"):
        arrays, rows = session.heldout.whole(settings.evaluation.rows)
        host = ({name: torch.from_numpy(value) for name, value in part.items()} for part in arrays)
        batches = session.accelerator.wrap_loader(host, session.device)
        slots = rows * settings.task.texts_per_row()
        found = score(settings.task, session.prepared, batches, slots)
    return {f"heldout/{name}": value for name, value in found.items()}
