"""One optimizer update: the same operations in a real step and in a rehearsal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.training.gradients import DropoutSeed
from regauge.training.optimizer import set_learning_rate

if TYPE_CHECKING:
    from torch import Tensor

    from regauge.accelerators import Batch
    from regauge.training.context import RunContext
    from regauge.training.state import TrainState
    from regauge.training.task_runtime import TaskRuntime


def optimizer_step(
    context: RunContext, state: TrainState, batches: list[Batch], task: TaskRuntime | None = None
) -> tuple[Tensor, Tensor]:
    """Do one step; return the global batch's [loss sum, weight] and the gradient norm.

    `task` defaults to this step's task. Nothing is read from the device unless the loss is scaled.
    """
    task = task or context.task_at(state.step)
    task_index = context.tasks.index(task)
    model, max_norm = state.model, context.settings.optimizer.max_grad_norm
    scale = state.loss_scale.tensor(context.device)
    fault_factor = context.hooks.gradient_factor(state.step)
    with context.hooks.compilation():
        totals = task.gradients.accumulate_gradients(
            batches,
            scale if fault_factor == 1 else scale * fault_factor,
            _dropout_seed(context, state),
        )
        learning_rate = state.lr_schedule.next()
        factor = 1 / (totals[1].clamp(min=1e-9) * scale)
        norm = model.gradient_norm() * factor
        if max_norm is not None:
            factor = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if state.loss_scale.should_update(norm) and state.guard.should_update(
            norm, totals, task_index
        ):
            model.scale_gradients(factor)
            set_learning_rate(state.optimizer, state.guard.masked_lr(learning_rate))
            context.saver.wait_for_copies()
            state.optimizer.step()
            model.sync_weights()
        model.clear_gradients()
        finite_totals = totals.where(norm.isfinite(), totals.new_zeros(()))
        context.metrics.add(finite_totals, norm, task_index)
        context.accelerator.end_step()
    return totals, norm


def _dropout_seed(context: RunContext, state: TrainState) -> DropoutSeed | None:
    """Return the framework generator's seed; None if dropout masks are counter-based."""
    if context.settings.model.dropout_kind == "counter":
        return None
    return DropoutSeed(context.accelerator, context.settings.seed, state.step, context.world.rank)
