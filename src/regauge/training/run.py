"""One attempt, from run settings to the final models."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from regauge.config import FORMAT, dump
from regauge.config.output_files import FAULTS
from regauge.config.run_names import name_run
from regauge.monitoring.trackers import RunInfo, start_trackers
from regauge.supervision import channel
from regauge.supervision.channel import WorkerReporter
from regauge.supervision.run_metrics import export_process
from regauge.system.log import logger
from regauge.training import run_record
from regauge.training.callbacks import CallbackHook, load_callbacks
from regauge.training.checkpointing import check_disk, resume_latest, take_over
from regauge.training.compile.decision import resolve_compile
from regauge.training.compile.warmup import finalize_state, warm_up
from regauge.training.early_stopping import FinalModel, check_metrics, load_final_weights
from regauge.training.export_models import write_models
from regauge.training.resolve import ResolvedRun, resolve_run
from regauge.training.run_setup import Run, set_up
from regauge.training.trainer import evaluate, train

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.supervision.faults.faults import FaultInjector
    from regauge.system.processes import World
    from regauge.training.callbacks import Callback
    from regauge.training.context import RunContext
    from regauge.training.settings import TrainSettings
    from regauge.training.state import TrainState


def attempt(
    settings: TrainSettings, world: World, callbacks: Sequence[Callback] = ()
) -> dict[str, Any]:
    """Start or resume a run; return the result. Every process calls this.

    If a supervisor started the process, it receives heartbeats and how the attempt ends.
    `callbacks` are called in addition to those in the settings.
    """
    reporter = WorkerReporter(channel.read_spec(), world.rank)
    exporting = (
        nullcontext() if reporter.spec else export_process(settings, world, reporter.heartbeat)
    )
    with exporting, reporter.capture_exit():
        return _attempt(settings, world, reporter, callbacks)


def _attempt(
    settings: TrainSettings, world: World, reporter: WorkerReporter, callbacks: Sequence[Callback]
) -> dict[str, Any]:
    reporter.heartbeat.beat("init")
    callbacks = [*load_callbacks(settings.callbacks), *callbacks]
    resolved = resolve_run(settings, world, reporter)
    joined = dist.is_initialized()
    injector = _fault_injector(resolved.settings, world, reporter)
    context, state = set_up(resolved.settings, world, reporter, injector=injector)
    context.ledger.add("init", time.monotonic() - reporter.start_clock)
    try:
        check_disk(context, state)
        context = replace(context, settings=resolve_compile(context, state))
        context.pack_batches()
        if callbacks:
            module, steps = state.model.module, context.total_steps
            hook = CallbackHook(callbacks, module, context.folder, rank=world.rank, steps=steps)
            context.hooks.add(hook)
        if world.is_main_process:
            _record(resolved, context, state, is_requested=settings.accelerator is not None)
        stop_reason, final_model = _train(Run(context, state), resolved.run_id)
        return _finish(context, state, stop_reason, final_model)
    finally:
        if dist.is_initialized() and not joined:
            dist.destroy_process_group()


def _fault_injector(
    settings: TrainSettings, world: World, reporter: WorkerReporter
) -> FaultInjector | None:
    spec = reporter.spec
    if spec is None or spec.fault_plan is None:
        return None
    from regauge.supervision.faults.faults import FaultInjector

    record = Path(settings.output.folder) / FAULTS
    return FaultInjector.read(spec.fault_plan, record, world.rank, spec.attempt)


def _record(
    resolved: ResolvedRun, context: RunContext, state: TrainState, *, is_requested: bool
) -> None:
    """Write run.json and environment.json, and the attempt's start.

    `is_requested` states whether the settings name the accelerator.
    """
    accelerator, device = context.accelerator, context.device
    run_record.write_records(
        context.folder,
        context.settings,
        resolved.data_fingerprint,
        resolved.run_id,
        state.weights_checksum,
        device=run_record.describe_device(accelerator, device, is_requested=is_requested),
        decisions=resolved.decisions,
    )
    context.reporter.record_start(context.folder, context.total_steps, accelerator.kind)


def _train(run: Run, run_id: str) -> tuple[str, FinalModel]:
    """Train; return why the run ended, and the final model, whose weights are loaded."""
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
    check_metrics(context, tuple(state.initial_metrics))
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
        model = load_final_weights(context, state, outcome.metrics)
        summary = {"steps": state.step, "model_step": model.step}
        tracker.finish({**summary, "stop_reason": outcome.stop_reason, **model.metrics})
    return outcome.stop_reason, model


def _facts(context: RunContext, state: TrainState, run_id: str) -> RunInfo:
    return RunInfo(
        name=name_run(context.folder),
        run_id=run_id,
        folder=context.folder,
        attempt=state.attempt,
        total_steps=context.total_steps,
        resumed_step=state.step,
        settings=dump(context.settings),
        on_wait=context.reporter.heartbeat.beat,
    )


def _finish(
    context: RunContext, state: TrainState, stop_reason: str, final_model: FinalModel
) -> dict[str, Any]:
    context.seal_cache()
    write_models(context, state, final_model.step)
    result = {
        "format": FORMAT,
        "output": str(context.folder),
        "steps": state.step,
        "stop_reason": stop_reason,
        "initial_metrics": state.initial_metrics,
        "metrics": final_model.metrics,
        "model_step": final_model.step,
        "best_step": state.best_step,
        "seconds": round(context.ledger.total_seconds, 3),
        "tokens": context.ledger.tokens,
        **context.ledger.cost.document,
    }
    if context.world.is_main_process:
        run_record.write_result(context.folder, result)
        _warn_about_metrics(final_model.metrics)
    return result


def _warn_about_metrics(metrics: dict[str, float]) -> None:
    losses = {name: value for name, value in metrics.items() if name.endswith("loss")}
    if names := [name for name, value in losses.items() if not math.isfinite(value)]:
        message = "%s of the final model is not finite; lower optimizer.learning_rate"
        logger.warning(message, " and ".join(names))
