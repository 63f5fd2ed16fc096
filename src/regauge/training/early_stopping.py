"""Held-out metrics that end a run early and select its final model.

The count is part of every checkpoint and depends only on metrics shared by all processes. So a
resumed run stops at the same step, and all processes stop together.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from regauge.system.choices import did_you_mean
from regauge.system.errors import SettingsError
from regauge.system.log import logger
from regauge.training.checkpoint.loading import load_checkpoint
from regauge.training.checkpointing import best_metric, metric_sign
from regauge.training.defaults import check_best_direction
from regauge.training.run_record import NO_IMPROVEMENT
from regauge.training.state import WEIGHT_PREFIX, Improvement

if TYPE_CHECKING:
    from regauge.training.context import RunContext
    from regauge.training.state import TrainState


class FinalModel(NamedTuple):
    """The step that provides the final weights."""

    step: int
    metrics: dict[str, float]
    """Held-out metrics of these weights; empty if no rows are held out."""


def check_metrics(context: RunContext, known: tuple[str, ...]) -> None:
    """Raise SettingsError if the run needs a metric that is not measured, or lacks a direction.

    `known` are the metrics evaluated before the first step.
    """
    settings = context.settings
    target, best = settings.stop.target, settings.output.checkpoint.best_metric
    is_named = best not in {"auto", "off"}
    needed = {
        "stop.target.metric": target.metric if target else None,
        "output.checkpoint.best_metric": best if is_named else None,
    }
    for key, name in needed.items():
        if name is not None and name not in known:
            remedy = did_you_mean(name, known) if known else "hold rows out, or remove the key"
            raise SettingsError(f"{key} = '{name}' is not measured in this run", remedy)
    if metric := best_metric(context):
        check_best_direction(settings, metric)


def count_evaluation(context: RunContext, state: TrainState, metrics: dict[str, float]) -> None:
    """Count an evaluation scheduled by `evaluation.every_steps`.

    It is an improvement if its metric beats the last improvement by more than `stop.min_delta`. A
    non-finite value is not an improvement.
    """
    if not metrics or not (metric := best_metric(context)):
        return
    last, value = state.improvement, metrics.get(metric, math.nan)
    gain = math.inf if last.value is None else metric_sign(context) * (value - last.value)
    if math.isfinite(value) and gain > context.settings.stop.min_delta:
        state.improvement = Improvement(value)
    else:
        state.improvement = Improvement(last.value, last.num_evaluations + 1)


def find_stop_reason(context: RunContext, state: TrainState) -> str:
    patience, count = context.settings.stop.patience, state.improvement.num_evaluations
    if patience is None or count < patience:
        return ""
    noun = "evaluation" if count == 1 else "evaluations"
    return f"{NO_IMPROVEMENT}{best_metric(context)} in {count} {noun}"


def load_final_weights(
    context: RunContext, state: TrainState, metrics: dict[str, float]
) -> FinalModel:
    """Load the final model's weights into the state; every process calls this.

    `metrics` is the last step's evaluation. The state cannot be trained further, because the
    optimizer keeps the last step's moments.
    """
    last, best_step = FinalModel(state.step, metrics), state.best_step
    is_main = context.world.is_main_process
    if best_step is None or best_step == state.step:
        return last
    best = f"{best_metric(context)}, {state.best_value:.4g}, is of step {best_step}"
    if not context.settings.has_best_final_model:
        if is_main:
            command = f"'regauge export {context.folder} export.step=best'"
            message = "the final model is of step %d; the best %s: export it with %s"
            logger.info(message, state.step, best, command)
        return last
    path = context.saver.find_step(best_step)
    if path is None:
        if is_main:
            message = "the best checkpoint, of step %d, cannot be loaded: the final model is of %d"
            logger.warning(message, best_step, state.step)
        return last
    if is_main:
        logger.info("the final model is the best one: %s", best)
    weights = {
        name: value for name, value in state.tensors().items() if name.startswith(WEIGHT_PREFIX)
    }
    load_checkpoint(path, weights)
    state.model.sync_weights()
    return FinalModel(best_step, state.best_metrics)
