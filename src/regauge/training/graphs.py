"""Compiled graphs: made before the first step for every declared shape, and none after.

A shape that nobody declared costs a compilation in the middle of a run; it is named, counted and,
past the budget, ends the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch._dynamo.config as compiler

from regauge.errors import NoProgressError
from regauge.log import logger
from regauge.models import build as models

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.accelerators import Accelerator
    from regauge.data.loader import Feed
    from regauge.training.session import Session

Batch = dict[str, torch.Tensor]
MODES = 3
"""A shape is computed with gradients, without them, and in evaluation."""


def warm_up(session: Session) -> None:
    """Compute every declared shape once, with weight 0; weights and gradients are unchanged."""
    if session.settings.execution.compile == "no":
        return
    _make_room(session)
    batch_rows = session.settings.batch.microbatch_rows
    for batch in _declared(session, session.feed, batch_rows):
        session.gradients.of([batch], torch.ones((), device=session.device))
        session.prepared.clear_gradients()
    evaluation_rows = session.settings.evaluation.microbatch_rows or batch_rows
    session.prepared.module.eval()
    with torch.no_grad():
        for batch in _declared(session, session.heldout, evaluation_rows):
            session.prepared.module(batch)
    session.accelerator.synchronize()


def _make_room(session: Session) -> None:
    """Let the compiler keep every declared graph, and those of the budget, of every block.

    Past its own limit (8 of one function) it computes the rest eagerly and only warns, so that
    nothing would be counted any more.
    """
    kept = MODES * len(session.ladder) * len(models.blocks(session.prepared.module))
    wanted = kept + session.settings.execution.recompile_budget + 1
    compiler.recompile_limit = max(compiler.recompile_limit, wanted)
    compiler.accumulated_recompile_limit = max(compiler.accumulated_recompile_limit, wanted)


class GraphGuard:
    """Counts the graphs that are compiled after the warm-up."""

    def __init__(self, accelerator: Accelerator, budget: int) -> None:
        self._accelerator = accelerator
        self._budget = budget
        self._known = accelerator.graphs_compiled()
        self.late = 0

    def check(self, step: int, batches: list[Batch]) -> None:
        """Say new graphs with the shapes of their step; past the budget raise NoProgressError."""
        count = self._accelerator.graphs_compiled()
        if count == self._known:
            return
        new, self._known = count - self._known, count
        self.late += new
        shapes = sorted({tuple(batch["tokens"].shape) for batch in batches})
        logger.warning("%d new graphs in step %d, whose batches have shapes %s", new, step, shapes)
        if self.late > self._budget:
            raise NoProgressError(
                f"{self.late} graphs were compiled after the warm-up, the last in step {step}"
                f" with shapes {shapes}",
                f"declare that shape, or raise execution.recompile_budget above {self._budget}",
            )


def _declared(session: Session, feed: Feed, rows: int) -> Iterator[Batch]:
    """Yield an empty batch of every declared shape of `rows` rows, on the device."""
    texts = rows * session.settings.task.texts_per_row()
    for length in session.ladder:
        arrays = feed.empty(texts, length)
        host = {name: torch.from_numpy(value) for name, value in arrays.items()}
        yield from session.accelerator.wrap_loader([host], session.device)
