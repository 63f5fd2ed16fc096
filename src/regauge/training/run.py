"""One attempt of a run, from its settings to its final model."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regauge.checkpoint.layout import list_steps, parse_step, read_best
from regauge.choices import did_you_mean
from regauge.config import FORMAT, dump
from regauge.errors import PreflightError, SettingsError
from regauge.files import write_json
from regauge.health.machine import free_bytes
from regauge.log import logger
from regauge.supervision import channel
from regauge.supervision.channel import WorkerReporter
from regauge.trackers import RunInfo, start_trackers
from regauge.training import run_record
from regauge.training.checkpointing import best_metric, resume_latest, take_over
from regauge.training.compile.decision import resolve_compile
from regauge.training.compile.warmup import finalize_state, warm_up
from regauge.training.export_models import write_models
from regauge.training.resolve import ResolvedRun, resolve_run
from regauge.training.run_setup import Run, set_up
from regauge.training.trainer import Outcome, evaluate, train

if TYPE_CHECKING:
    from regauge.processes import World
    from regauge.testing.faults import FaultInjector
    from regauge.training.context import RunContext
    from regauge.training.settings import TrainSettings
    from regauge.training.state import TrainState

VALUES_PER_WEIGHT = 3
"""In a checkpoint: the weight and two moments."""


def attempt(settings: TrainSettings, world: World) -> dict[str, Any]:
    """Start or resume a run and return its result; every process calls this.

    If a supervisor started the process, it receives heartbeats and how the attempt ends.
    """
    reporter = WorkerReporter(channel.read_spec(), world.rank)
    with reporter.capture_exit():
        return _attempt(settings, world, reporter)


def _attempt(settings: TrainSettings, world: World, reporter: WorkerReporter) -> dict[str, Any]:
    reporter.heartbeat.beat("init")
    resolved = resolve_run(settings, world, reporter)
    joined = dist.is_initialized()
    injector = _fault_injector(resolved.settings, world, reporter)
    context, state = set_up(resolved.settings, world, reporter, injector=injector)
    context.ledger.add("init", time.monotonic() - reporter.start_clock)
    try:
        _check_disk(context, state)
        context = replace(context, settings=resolve_compile(context, state))
        if world.is_main_process:
            _record(resolved, context, state)
        outcome = _train(Run(context, state), resolved.run_id)
        return _finish(context, state, outcome)
    finally:
        if dist.is_initialized() and not joined:
            dist.destroy_process_group()


def _fault_injector(
    settings: TrainSettings, world: World, reporter: WorkerReporter
) -> FaultInjector | None:
    spec = reporter.spec
    if spec is None or spec.fault_plan is None:
        return None
    from regauge.testing.faults import RECORD, FaultInjector

    record = Path(settings.output.folder) / RECORD
    return FaultInjector.read(spec.fault_plan, record, world.rank, spec.attempt)


def _record(resolved: ResolvedRun, context: RunContext, state: TrainState) -> None:
    """Write run.json and environment.json, and the start of the attempt."""
    run_record.write_records(
        context.folder,
        context.settings,
        resolved.data_fingerprint,
        resolved.run_id,
        state.weights_checksum,
    )
    context.reporter.record_start(context.folder)


def _check_disk(context: RunContext, state: TrainState) -> None:
    """Raise PreflightError if no checkpoint fits on the disk; warn if not all that are kept fit.

    A checkpoint is assumed to hold every trained weight and two moments of it, in fp32.
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


def _train(run: Run, run_id: str) -> Outcome:
    context, state = run
    with context.hooks.phase("compile"):
        warm_up(context, state, context.shapes)
    compile_seconds = context.ledger.seconds["compile"]
    is_resumed = resume_latest(context, state)
    context.reporter.report_step(state.step)
    if context.reporter.spec:
        state.attempt = context.reporter.spec.attempt
    finalize_state(context, state)
    if not is_resumed:
        if context.settings.model.init_from is not None:
            take_over(state, context.settings.model.init_from)
        state.initial_metrics = evaluate(context, state)
    context.seal_cache(compile_seconds)
    _check_metrics(context, state)
    if context.settings.profile and context.world.is_main_process:
        from regauge.training.profile.profiler import StepProfiler

        context.hooks.add(StepProfiler(context, state))
    if context.world.is_main_process and is_resumed:
        logger.info("Resuming from step %d (attempt %d).", state.step, state.attempt)
    if context.world.is_main_process and not state.initial_metrics:
        logger.info("no rows are held out: the run is not evaluated")
    trackers = context.settings.output.trackers if context.world.is_main_process else ()
    with start_trackers(trackers, _facts(context, state, run_id)) as tracker:
        if not is_resumed and state.initial_metrics:
            tracker.log(0, state.initial_metrics)
        outcome = train(context, state, tracker)
        tracker.finish({"steps": state.step, "stop_reason": outcome.stop_reason, **outcome.metrics})
    return outcome


def _facts(context: RunContext, state: TrainState, run_id: str) -> RunInfo:
    return RunInfo(
        name=context.folder.name,
        run_id=run_id,
        folder=context.folder,
        attempt=state.attempt,
        total_steps=context.total_steps,
        resumed_step=state.step,
        settings=dump(context.settings),
    )


def _check_metrics(context: RunContext, state: TrainState) -> None:
    """Raise SettingsError for a metric that the run needs and no evaluation measures."""
    settings, known = context.settings, tuple(state.initial_metrics)
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


def _finish(context: RunContext, state: TrainState, outcome: Outcome) -> dict[str, Any]:
    """Write the final models and the result; return the result."""
    context.seal_cache()
    write_models(context, state)
    best = read_best(context.settings.output.checkpoint_folder)
    best_step = parse_step(best["checkpoint"]) if best else None
    if best and best_step != state.step and context.world.is_main_process:
        message = (
            "the final model is of step %d; the best %s, %.4g, is of step %d: export it with %s"
        )
        command = f"'regauge export {context.folder} export.step=best'"
        logger.info(message, state.step, best["metric"], best["value"], best_step, command)
    result = {
        "format": FORMAT,
        "output": str(context.folder),
        "steps": state.step,
        "stop_reason": outcome.stop_reason,
        "initial_metrics": state.initial_metrics,
        "metrics": outcome.metrics,
        "best_step": best_step,
        "seconds": round(context.ledger.total_seconds, 3),
        "tokens": context.ledger.tokens,
        **context.ledger.cost.document,
    }
    if context.world.is_main_process:
        write_json(context.folder / run_record.RESULT, result)
    return result
