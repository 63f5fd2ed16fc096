"""Replay: computes some steps again, to compare two computations.

replay.jsonl      loss and gradient norm per step
capture-*         values of captured steps, see `capture.py`
checkpoints/      the state at `replay.save_at_step`
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regauge.config.output_files import FAULTS
from regauge.data.loader import prefetch_batches
from regauge.system import jsonl
from regauge.system.errors import SettingsError
from regauge.system.wording import format_count
from regauge.training import task_schedule
from regauge.training.checkpointing import restore, save_checkpoint
from regauge.training.defaults import resolve_defaults
from regauge.training.divergence.capture import StepCapture
from regauge.training.optimizer import optimizer_step
from regauge.training.references import add_references
from regauge.training.run_setup import set_up

if TYPE_CHECKING:
    from regauge.supervision.faults.faults import FaultInjector
    from regauge.system.processes import World
    from regauge.training.context import RunContext
    from regauge.training.divergence.settings import ReplaySettings, ReplaySteps
    from regauge.training.state import TrainState

RECORD = "replay.jsonl"


def replay(settings: ReplaySettings, world: World) -> dict[str, Any]:
    """Compute steps again in `output.folder`; every process calls this."""
    task_schedule.read_manifests(settings)
    resolved = resolve_defaults(settings, world)
    was_initialized = dist.is_initialized()
    options, folder = settings.replay, Path(settings.output.folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = torch.float64 if options.float64 else None
    injector = _fault_injector(options.fault_plan, folder, world)
    context, state = set_up(resolved, world, dtype=dtype, injector=injector)
    try:
        if options.until > context.total_steps:
            steps = format_count(context.total_steps, "step")
            problem = f"replay.until is {options.until}, and the run has {steps}"
            raise SettingsError(problem, "set replay.until to one of them")
        add_references(context, state)
        if options.checkpoint is not None:
            restore(context, state, Path(options.checkpoint))
        if state.step >= options.until:
            raise SettingsError(
                f"{options.checkpoint} is at step {state.step}, after the steps to replay",
                "set replay.checkpoint to an earlier checkpoint",
            )
        state.lr_schedule.seek(state.step)
        _run_steps(context, state, options, folder)
        context.saver.wait()
    finally:
        if dist.is_initialized() and not was_initialized:
            dist.destroy_process_group()
    return {"output": str(folder), "steps": state.step}


def _fault_injector(plan: str | None, folder: Path, world: World) -> FaultInjector | None:
    if plan is None:
        return None
    from regauge.supervision.faults import faults

    return faults.FaultInjector.read(plan, folder / FAULTS, world.rank)


def _run_steps(context: RunContext, state: TrainState, options: ReplaySteps, folder: Path) -> None:
    steps = prefetch_batches(
        context.read_batches, state.step, options.until, workers=0, max_ahead=0
    )
    context.metrics.begin()
    for arrays in steps:
        if state.step == options.save_at_step:
            save_checkpoint(context, state, {})
        batches = [
            {name: torch.from_numpy(value).to(context.device) for name, value in batch.items()}
            for batch in arrays
        ]
        with context.hooks.around_step(state.step, batches):
            if state.step in options.capture_steps:
                capture = StepCapture(context, state, options.noise)
                with capture.record(batches):
                    totals, norm = optimizer_step(context, state, batches)
                capture.write(folder, state.step)
            else:
                totals, norm = optimizer_step(context, state, batches)
        loss, weight = totals.tolist()
        state.step += 1
        if context.world.is_main_process:
            line = {"step": state.step, "loss": loss / max(weight, 1e-9), "grad_norm": float(norm)}
            jsonl.append_line(folder / RECORD, line)
