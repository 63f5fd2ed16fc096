"""Run checkpoints: save the state, resume from the newest one, take over an earlier run."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from regauge.config.output_files import LEDGER
from regauge.run_folders.checkpoint_files import list_steps
from regauge.run_folders.cost_meter import write_last_seen
from regauge.run_folders.documents import LedgerLine
from regauge.supervision.health.machine import free_bytes
from regauge.system import jsonl
from regauge.system.errors import DataError, PreflightError
from regauge.system.log import logger
from regauge.training import optimizer as optimizers
from regauge.training.checkpoint.loading import load_checkpoint
from regauge.training.defaults import find_best_direction
from regauge.training.guards import check_replicas
from regauge.training.references import add_references
from regauge.training.state import MOMENT_PREFIX, Improvement
from regauge.training.task_schedule import data_fingerprint
from regauge.training.warm_start import count_earlier_steps, find_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.models.settings import InitFrom
    from regauge.training.context import RunContext
    from regauge.training.state import TrainState


VALUES_PER_WEIGHT = 3
"""In a checkpoint: the weight and two moments."""


def check_disk(context: RunContext, state: TrainState) -> None:
    """Raise PreflightError if no checkpoint fits on the disk; warn if not all kept ones fit.

    Assumes that a checkpoint holds every trained weight and two moments per weight, in fp32.
    """
    options = context.settings.output.checkpoint
    weights = state.model.module.parameters()
    count = sum(weight.numel() for weight in weights if weight.requires_grad)
    needed = count * VALUES_PER_WEIGHT * torch.float32.itemsize
    free = free_bytes(context.folder)
    copies = options.keep_last + 1 + bool(best_metric(context))
    existing = len(list_steps(context.settings.output.checkpoint_folder))
    problem = f"a checkpoint needs about {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free"
    if free < needed:
        remedy = "free some space, or set another output.folder"
        raise PreflightError(f"{problem} at {context.folder}", remedy)
    if context.world.is_main_process and free < needed * (copies - existing):
        logger.warning("%s: not enough for the %d that are kept at a time", problem, copies)


def save_checkpoint(context: RunContext, state: TrainState, metrics: dict[str, float]) -> None:
    """Save the state once all replicas agree; the files are written during the next steps.

    `metrics` is this step's evaluation, or empty.
    """
    best = None
    if is_best(context, state, metrics):
        metric = best_metric(context)
        state.best_value, state.best_step = metrics[metric], state.step
        state.best_metrics = metrics
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
    """Return the metric that selects the best checkpoint; empty if none does."""
    metric = context.settings.output.checkpoint.best_metric
    if metric == "off" or not context.heldout:
        return ""
    return f"{next(iter(context.heldout))}/loss" if metric == "auto" else metric


def is_best(context: RunContext, state: TrainState, metrics: dict[str, float]) -> bool:
    """Return whether this evaluation is the best one so far.

    Equal on all processes, because the best value is part of the state. Non-finite values are never
    the best.
    """
    if not metrics:  # most steps have no evaluation
        return False
    metric = best_metric(context)
    value = metrics.get(metric, math.nan)
    if not math.isfinite(value):
        return False
    sign = metric_sign(context)
    return state.best_value is None or sign * value > sign * state.best_value


def metric_sign(context: RunContext) -> int:
    """Return 1 if higher values of the best checkpoint's metric are better, else -1."""
    return 1 if find_best_direction(context.settings, best_metric(context)) == "max" else -1


def build_document(context: RunContext, state: TrainState) -> dict[str, Any]:
    """Return the checkpoint's JSON state; equal for equal runs."""
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
        "best_step": state.best_step,
        "best_metrics": state.best_metrics,
        "improvement": asdict(state.improvement),
        "schedule_offset": state.lr_schedule.offset,
        "ledger": context.ledger.state(),
    }


def resume_latest(context: RunContext, state: TrainState) -> bool:
    """Load the newest whole checkpoint; return whether there is one.

    Before that, rows get the reference values computed with the weights of step 0.
    """
    add_references(context, state)
    path = context.saver.find_newest()
    if path is None:
        return False
    document = restore(context, state, path)
    if state.best_step is not None:
        best = {"metric": best_metric(context), "value": state.best_value}
        context.saver.fetch_best(state.best_step, best)
    state.attempt = document["attempt"] + 1
    last_line = jsonl.read_last_line(context.folder / LEDGER, LedgerLine)
    context.ledger.restore(document["ledger"], last_line)
    return True


def restore(context: RunContext, state: TrainState, path: Path) -> dict[str, Any]:
    """Load a whole checkpoint into the state; return the document.

    Checkpoints do not contain frozen weights. Raises DataError if the frozen weights have changed
    since the checkpoint was saved.
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
    state.best_value, state.best_step = document["best_value"], document.get("best_step")
    state.best_metrics = document.get("best_metrics", {})
    state.improvement = Improvement(**document.get("improvement", {}))
    state.lr_schedule.offset = document.get("schedule_offset", 0)
    state.loss_scale.restore(document["loss_scale"])
    state.guard.restore(document["guard"])
    return document


def take_over(state: TrainState, origin: InitFrom) -> None:
    """Load the state that a warm start takes from an earlier run, besides the weights.

    It is the learning rate schedule position and, unless reset, the optimizer moments.
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
