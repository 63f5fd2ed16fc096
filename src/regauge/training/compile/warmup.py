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
from regauge.models.multitask import set_active_task
from regauge.training import optimizer as optimizers
from regauge.training.optimizer_step import optimizer_step

if TYPE_CHECKING:
    from regauge.accelerators import Accelerator, Batch
    from regauge.data.loader import Feed
    from regauge.training.context import BatchShape, RunContext
    from regauge.training.objectives import TaskRuntime
    from regauge.training.state import TrainState

MODES = 3
"""A shape is computed with gradients, without them, and in evaluation."""


def warm_up(context: RunContext, state: TrainState, shapes: tuple[BatchShape, ...]) -> None:
    """Compute declared shapes once, with weight 0; weights and gradients are unchanged.

    On a lazy device the whole step is computed; this comes before a checkpoint is loaded, and what
    has changed of the optimizer's state is then put right by `settle`.
    """
    if context.accelerator.lazy:
        _rehearse(context, state, shapes)
    elif context.settings.execution.compile == "blocks":
        _compute(context, state, shapes)


def settle_state(context: RunContext, state: TrainState) -> None:
    """End the making of a lazy device's state; called before the first step.

    Such a device updates in place what a graph made, and not what was sent to it: without this the
    second step would have other graphs than the first. A product with 1 changes no bit.
    """
    if not context.accelerator.lazy:
        return
    counts = [state["step"] for state in state.optimizer.state.values() if "step" in state]
    with torch.no_grad():
        torch._foreach_mul_(list(state.tensors().values()), 1.0)
        torch._foreach_mul_(counts, float(state.resumed_step > 0))
    context.accelerator.end_step()


def _rehearse(context: RunContext, state: TrainState, shapes: tuple[BatchShape, ...]) -> None:
    """Do a step of no rows for every shape: no gradient, no decay, a vanishing rate."""
    optimizers.prime_state(state.optimizer)
    state.loss_scale.tensor(context.device)
    context.accelerator.end_step()
    for task, length in shapes:
        batch = task.batch
        own = -(-batch.microbatches // context.world.size)
        batches = build_empty_batches(context, task, task.feed, length, (own, batch.microbatch))
        state.lr_schedule.seek(-1)
        optimizer_step(context, state, batches, task)
    context.metrics.begin()
    state.guard.begin()


def _compute(context: RunContext, state: TrainState, shapes: tuple[BatchShape, ...]) -> None:
    """Compute every shape forward and backward, and as an evaluation does."""
    raise_recompile_limit(context, state)
    for task, length in shapes:
        size = (1, task.batch.microbatch)
        batches = build_empty_batches(context, task, task.feed, length, size)
        task.gradients.accumulate_gradients(batches, torch.ones((), device=context.device))
        state.model.clear_gradients()
    state.model.module.eval()
    with torch.no_grad():
        for task, length in shapes:
            for heldout in list(task.heldout.values())[:1]:
                set_active_task(state.model.module, task.name)
                rows, _ = heldout.feed.largest
                (batch,) = build_empty_batches(context, task, heldout.feed, length, (1, rows))
                state.model.module(batch)
    context.accelerator.synchronize()


def raise_recompile_limit(context: RunContext, state: TrainState) -> None:
    """Let the compiler keep every declared graph, and those of the budget, of every block.

    Past its own limit (8 of one function) it computes the rest eagerly and only warns, so that
    nothing would be counted any more.
    """
    kept = MODES * len(context.shapes) * len(models.blocks(state.model.module))
    wanted = kept + context.settings.execution.recompile_budget + 1
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


def build_empty_batches(
    context: RunContext,
    task: TaskRuntime,
    feed: Feed,
    length: int,
    size: tuple[int, int],
) -> list[Batch]:
    """Return empty batches of a length, on the device; `size` is how many, of how many rows."""
    count, rows = size
    arrays = feed.empty(rows * task.task.slots_per_row(), length)
    host = [{name: torch.from_numpy(value) for name, value in arrays.items()} for _ in range(count)]
    with closing(context.accelerator.wrap_loader(iter([host]), context.device)) as placed:
        found: list[Batch] = next(placed)
    return found
