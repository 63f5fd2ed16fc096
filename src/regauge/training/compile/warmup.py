"""Compiled graphs: made before the first step for every declared shape, and none after.

A shape that nobody declared costs a compilation in the middle of a run; it is named, counted and,
past the budget, ends the run.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import torch
import torch._dynamo.config as compiler

from regauge.errors import NoProgressError
from regauge.log import logger
from regauge.models import architectures as models
from regauge.models.multitask import turn_to
from regauge.training import optimizer as optimizers
from regauge.training.optimizer_step import advance

if TYPE_CHECKING:
    from regauge.accelerators import Accelerator, Batch
    from regauge.data.loader import Feed
    from regauge.training.objectives import Objective
    from regauge.training.session import Session, Shape

MODES = 3
"""A shape is computed with gradients, without them, and in evaluation."""


def warm_up(session: Session, shapes: tuple[Shape, ...]) -> None:
    """Compute declared shapes once, with weight 0; weights and gradients are unchanged.

    On a lazy device the whole step is computed; this comes before a checkpoint is loaded, and what
    has changed of the optimizer's state is then put right by `settle`.
    """
    if session.accelerator.lazy:
        _rehearse(session, shapes)
    elif session.settings.execution.compile == "blocks":
        _compute(session, shapes)


def settle(session: Session) -> None:
    """End the making of a lazy device's state; called before the first step.

    Such a device updates in place what a graph made, and not what was sent to it: without this the
    second step would have other graphs than the first. A product with 1 changes no bit.
    """
    if not session.accelerator.lazy:
        return
    counts = [state["step"] for state in session.optimizer.state.values() if "step" in state]
    with torch.no_grad():
        torch._foreach_mul_(list(session.values().values()), 1.0)
        torch._foreach_mul_(counts, float(session.resumed_step > 0))
    session.accelerator.end_step()


def _rehearse(session: Session, shapes: tuple[Shape, ...]) -> None:
    """Do a step of no rows for every shape: no gradient, no decay, a vanishing rate."""
    optimizers.prime(session.optimizer)
    session.scale.tensor(session.device)
    session.accelerator.end_step()
    for objective, length in shapes:
        batch = objective.batch
        own = -(-batch.microbatches // session.world.size)
        batches = empty(session, objective, objective.feed, length, (own, batch.microbatch))
        session.rates.begin(-1)
        advance(session, batches, objective)
    session.interval.begin()
    session.guard.begin()


def _compute(session: Session, shapes: tuple[Shape, ...]) -> None:
    """Compute every shape forward and backward, and as an evaluation does."""
    make_room(session)
    for objective, length in shapes:
        size = (1, objective.batch.microbatch)
        batches = empty(session, objective, objective.feed, length, size)
        objective.gradients.of(batches, torch.ones((), device=session.device))
        session.prepared.clear_gradients()
    session.prepared.module.eval()
    with torch.no_grad():
        for objective, length in shapes:
            for heldout in list(objective.heldout.values())[:1]:
                turn_to(session.prepared.module, objective.name)
                rows, _ = heldout.feed.largest
                (batch,) = empty(session, objective, heldout.feed, length, (1, rows))
                session.prepared.module(batch)
    session.accelerator.synchronize()


def make_room(session: Session) -> None:
    """Let the compiler keep every declared graph, and those of the budget, of every block.

    Past its own limit (8 of one function) it computes the rest eagerly and only warns, so that
    nothing would be counted any more.
    """
    kept = MODES * len(session.shapes) * len(models.blocks(session.prepared.module))
    wanted = kept + session.settings.execution.recompile_budget + 1
    compiler.recompile_limit = max(compiler.recompile_limit, wanted)
    compiler.accumulated_recompile_limit = max(compiler.accumulated_recompile_limit, wanted)


class GraphGuard:
    """Counts the graphs that are made after the warm-up.

    A lazy device makes those of an evaluation when the first one comes.
    """

    def __init__(self, accelerator: Accelerator, budget: int) -> None:
        self._accelerator = accelerator
        self._budget = budget
        self._known = accelerator.graphs_compiled()
        self._evaluated = False
        self.late = 0

    def check_step(self, step: int, batches: list[Batch]) -> None:
        """Say late graphs with the shapes of their step; past the budget raise NoProgressError."""
        shapes = sorted({tuple(batch["tokens"].shape) for batch in batches})
        where = f"in step {step} with shapes {shapes}"
        self._check(where, "declare that shape")

    def check_evaluation(self, step: int) -> None:
        """Do the same for the graphs of an evaluation."""
        first, self._evaluated = not self._evaluated, True
        if first and self._accelerator.lazy:
            self._known = self._accelerator.graphs_compiled()
        self._check(f"in the evaluation after step {step}", "see its rows")

    def _check(self, where: str, remedy: str) -> None:
        count = self._accelerator.graphs_compiled()
        if count == self._known:
            return
        new, self._known = count - self._known, count
        self.late += new
        logger.warning("%d new graphs %s", new, where)
        if self.late > self._budget:
            raise NoProgressError(
                f"{self.late} graphs were compiled after the warm-up, the last {where}",
                f"{remedy}, or raise execution.recompile_budget above {self._budget}",
            )


def empty(
    session: Session, objective: Objective, feed: Feed, length: int, size: tuple[int, int]
) -> list[Batch]:
    """Return empty batches of a length, on the device; `size` is how many, of how many rows."""
    count, rows = size
    arrays = feed.empty(rows * objective.task.slots_per_row(), length)
    host = [{name: torch.from_numpy(value) for name, value in arrays.items()} for _ in range(count)]
    with closing(session.accelerator.wrap_loader(iter([host]), session.device)) as placed:
        found: list[Batch] = next(placed)
    return found
