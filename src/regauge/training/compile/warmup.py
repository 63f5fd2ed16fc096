"""Warm-up: compiles every declared shape before the first step, and nothing after it.

Another shape would compile in the middle of a run. `RecompileMonitor` logs and counts such graphs,
and ends the run when they exceed `execution.recompile_budget`.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import torch
import torch._dynamo.config as compiler

from regauge.models import architectures
from regauge.models.multitask import set_active_task
from regauge.system.errors import NoProgressError
from regauge.system.log import logger
from regauge.training.optimizer import optimizer_step, prime_state

if TYPE_CHECKING:
    from regauge.accelerators import Accelerator, Batch
    from regauge.data.loader import BatchLoader
    from regauge.training.context import BatchShape, RunContext
    from regauge.training.state import TrainState
    from regauge.training.task_runtime import TaskRuntime

GRAPHS_PER_SHAPE = 3
"""A shape is computed in training, in training without gradients, and in evaluation."""


def warm_up(context: RunContext, state: TrainState, shapes: tuple[BatchShape, ...]) -> None:
    """Compute each declared shape once, with empty rows; weights and gradients stay unchanged.

    On a lazy device a whole step is rehearsed. So warm-up comes before a checkpoint is loaded, and
    `finalize_state` then restores the optimizer state.
    """
    if context.accelerator.is_lazy:
        _rehearse_steps(context, state, shapes)
    elif context.settings.execution.compile == "blocks":
        _compute_shapes(context, state, shapes)


def finalize_state(context: RunContext, state: TrainState) -> None:
    """Make all state tensors graph outputs; called before the first step on a lazy device.

    A lazy device updates graph outputs in place, but not tensors copied to it. Without this, the
    second step would have other graphs than the first. Multiplying by 1 changes no bit.
    """
    if not context.accelerator.is_lazy:
        return
    counts = [state["step"] for state in state.optimizer.state.values() if "step" in state]
    with torch.no_grad():
        torch._foreach_mul_(list(state.tensors().values()), 1.0)
        torch._foreach_mul_(counts, float(state.resumed_step > 0))
    context.accelerator.end_step()


def _rehearse_steps(context: RunContext, state: TrainState, shapes: tuple[BatchShape, ...]) -> None:
    """Do an empty step for every shape: zero gradients, a vanishing learning rate."""
    prime_state(state.optimizer)
    state.loss_scale.tensor(context.device)
    context.accelerator.end_step()
    for task, length in shapes:
        batch = task.batch
        size = (-(-batch.microbatches // context.world.size), batch.microbatch)
        batches = build_empty_batches(context, task, task.loader, length, size)
        state.lr_schedule.seek(-1)
        optimizer_step(context, state, batches, task)
    context.metrics.begin()
    state.guard.begin()


def _compute_shapes(context: RunContext, state: TrainState, shapes: tuple[BatchShape, ...]) -> None:
    raise_recompile_limit(context, state)
    for task, length in shapes:
        size = (1, task.batch.microbatch)
        batches = build_empty_batches(context, task, task.loader, length, size)
        task.gradients.accumulate_gradients(batches, torch.ones((), device=context.device))
        state.model.clear_gradients()
    state.model.module.eval()
    with torch.no_grad():
        for task, length in shapes:
            for heldout in list(task.heldout.values())[:1]:
                set_active_task(state.model.module, task.name)
                rows, _ = heldout.loader.largest_shape
                (batch,) = build_empty_batches(context, task, heldout.loader, length, (1, rows))
                state.model.module(batch)
    context.accelerator.synchronize()


def raise_recompile_limit(context: RunContext, state: TrainState) -> None:
    """Raise torch's recompile limits to all declared graphs of all blocks, and the budget.

    Above its limit (8 graphs per function by default) torch computes eagerly and only warns, so
    that graphs would no longer be counted.
    """
    num_blocks = len(architectures.find_blocks(state.model.module))
    num_graphs = GRAPHS_PER_SHAPE * len(context.shapes) * num_blocks
    limit = num_graphs + context.settings.execution.recompile_budget + 1
    compiler.recompile_limit = max(compiler.recompile_limit, limit)
    compiler.accumulated_recompile_limit = max(compiler.accumulated_recompile_limit, limit)


class RecompileMonitor:
    """Counts graphs compiled after the warm-up.

    A lazy device compiles the evaluation graphs in the first evaluation; they do not count.
    """

    def __init__(self, accelerator: Accelerator, budget: int) -> None:
        self._accelerator = accelerator
        self._budget = budget
        self._num_graphs = accelerator.num_compiled_graphs()
        self._has_evaluated = False
        self.num_recompiled = 0

    def check_step(self, step: int, batches: list[Batch]) -> None:
        """Log a step's new graphs with its shapes; raises NoProgressError above the budget."""
        shapes = sorted({tuple(batch["tokens"].shape) for batch in batches})
        self._check(f"in step {step} with shapes {shapes}", "declare that shape")

    def check_evaluation(self, step: int) -> None:
        """Log an evaluation's new graphs; raises NoProgressError above the budget."""
        is_first, self._has_evaluated = not self._has_evaluated, True
        if is_first and self._accelerator.is_lazy:
            self._num_graphs = self._accelerator.num_compiled_graphs()
        self._check(f"in the evaluation after step {step}", "check the shapes of held-out batches")

    def _check(self, location: str, remedy: str) -> None:
        count = self._accelerator.num_compiled_graphs()
        if count == self._num_graphs:
            return
        num_new, self._num_graphs = count - self._num_graphs, count
        self.num_recompiled += num_new
        logger.warning("%d new graphs %s", num_new, location)
        if self.num_recompiled > self._budget:
            raise NoProgressError(
                f"{self.num_recompiled} graphs compiled after the warm-up, the last {location}",
                f"{remedy}, or raise execution.recompile_budget above {self._budget}",
            )


def build_empty_batches(
    context: RunContext,
    task: TaskRuntime,
    loader: BatchLoader,
    length: int,
    size: tuple[int, int],
) -> list[Batch]:
    """Return batches of `length` tokens with empty rows, on the device.

    `size` is [number of batches, rows per batch].
    """
    count, rows = size
    arrays = loader.build_empty_batch(rows * task.task.slots_per_row(), length)
    host = [{name: torch.from_numpy(value) for name, value in arrays.items()} for _ in range(count)]
    with closing(context.accelerator.wrap_loader(iter([host]), context.device)) as steps:
        batches: list[Batch] = next(steps)
    return batches
