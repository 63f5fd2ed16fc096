"""Checkpoints of a run: save the state, resume from the newest one, take over an earlier run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from regauge import jsonl
from regauge.checkpoint.loading import load_checkpoint
from regauge.errors import DataError, SettingsError
from regauge.supervision.cost_meter import LedgerLine, write_last_seen
from regauge.tasks import UNORDERED, lower_is_better
from regauge.training import optimizer as optimizers
from regauge.training.guards import check_replicas
from regauge.training.ledger import LEDGER
from regauge.training.references.add_references import add_references
from regauge.training.state import MOMENT_PREFIX
from regauge.training.task_schedule import data_fingerprint
from regauge.training.warm_start import count_earlier_steps, find_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.models.settings import InitFrom
    from regauge.training.context import RunContext
    from regauge.training.state import TrainState


def save_checkpoint(context: RunContext, state: TrainState, metrics: dict[str, float]) -> None:
    """Save the state once all replicas agree; the files are written during the next steps.

    `metrics` is the evaluation of this step, or empty.
    """
    best = None
    if is_best(context, state, metrics):
        metric = best_metric(context)
        state.best_value = metrics[metric]
        best = {"metric": metric, "value": state.best_value}
    with context.hooks.phase("checkpoint"):
        check_replicas(state.model.replicated_tensors(), context.world, state.step)
        document = build_document(context, state)
        if context.world.is_main_process:
            write_last_seen(context.folder)
        context.saver.save(state.step, state.tensors(), document, best)
        if context.accelerator.is_lazy:  # operations of two threads would be one graph
            context.saver.wait_for_copies()


def best_metric(context: RunContext) -> str:
    """Return the metric that selects the best checkpoint; empty if no checkpoint is the best.

    Raises SettingsError for a metric that has no best value.
    """
    metric = context.settings.output.checkpoint.best_metric
    if metric.rpartition("/")[2] in UNORDERED:
        problem = f"output.checkpoint.best_metric = '{metric}' has no best value"
        raise SettingsError(problem, "name another metric, such as heldout/loss")
    if metric == "off" or not context.heldout:
        return ""
    return f"{next(iter(context.heldout))}/loss" if metric == "auto" else metric


def is_best(context: RunContext, state: TrainState, metrics: dict[str, float]) -> bool:
    """Return whether this evaluation is the best one so far.

    Equal on all processes, because the best value is part of the state. A value that is not finite
    is never the best.
    """
    if not metrics:  # most steps have no evaluation
        return False
    metric = best_metric(context)
    value = metrics.get(metric, math.nan)
    if not math.isfinite(value):
        return False
    mode = context.settings.output.checkpoint.best_mode
    is_minimum = lower_is_better(metric) if mode == "auto" else mode == "min"
    sign = -1 if is_minimum else 1
    return state.best_value is None or sign * value > sign * state.best_value


def build_document(context: RunContext, state: TrainState) -> dict[str, Any]:
    """Return the JSON state of a checkpoint; it is equal for equal runs."""
    return {
        "step": state.step,
        "seed": context.settings.seed,
        "data_fingerprint": data_fingerprint([task.manifest for task in context.tasks]),
        "attempt": state.attempt,
        "frozen_checksum": state.frozen_checksum,
        "optimizer_steps": state.optimizer_steps,
        "loss_scale": state.loss_scale.state(),
        "guard": state.guard.state(),
        "initial_metrics": state.initial_metrics,
        "best_value": state.best_value,
        "schedule_offset": state.lr_schedule.offset,
        "ledger": context.ledger.state(),
    }


def resume_latest(context: RunContext, state: TrainState) -> bool:
    """Load the newest whole checkpoint; return whether there is one.

    Before that, rows get the reference values of the weights of step 0.
    """
    add_references(context, state)
    path = context.saver.find_newest()
    if path is None:
        return False
    document = restore(context, state, path)
    state.attempt = document["attempt"] + 1
    last_line = jsonl.read_last_line(context.folder / LEDGER, LedgerLine)
    context.ledger.restore(document["ledger"], last_line)
    return True


def restore(context: RunContext, state: TrainState, path: Path) -> dict[str, Any]:
    """Load a whole checkpoint into the state, and return its document.

    Checkpoints contain no frozen weights. Raises DataError if the frozen weights have changed since
    the checkpoint was saved.
    """
    context.saver.wait_for_copies()
    if not state.optimizer.state:
        optimizers.prime_state(state.optimizer)
    document = load_checkpoint(path, state.tensors())
    if document.get("frozen_checksum", state.frozen_checksum) != state.frozen_checksum:
        raise DataError(
            f"the frozen weights have changed since {path} was saved",
            "restore the weights of model.path, or start a new run in another output.folder",
        )
    state.set_optimizer_steps(document["optimizer_steps"])
    state.model.sync_weights()
    state.model.clear_gradients()
    state.step = state.resumed_step = document["step"]
    state.initial_metrics = document["initial_metrics"]
    state.best_value = document["best_value"]
    state.lr_schedule.offset = document.get("schedule_offset", 0)
    state.loss_scale.restore(document["loss_scale"])
    state.guard.restore(document["guard"])
    return document


def take_over(state: TrainState, origin: InitFrom) -> None:
    """Load the state of an earlier run that a warm start takes in addition to the weights.

    It is the position in the learning rate schedule and, unless reset, the optimizer moments.
    """
    state.lr_schedule.offset = count_earlier_steps(origin)
    if origin.optimizer == "reset":
        return
    optimizers.prime_state(state.optimizer)
    moments = {
        name: moment for name, moment in state.tensors().items() if name.startswith(MOMENT_PREFIX)
    }
    document = load_checkpoint(find_checkpoint(origin), moments)
    state.set_optimizer_steps(document["optimizer_steps"])
