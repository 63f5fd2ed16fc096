"""Replay: computes some steps of a run again, so that two computations can be compared.

replay.jsonl      loss and gradient norm of each step
capture-*         what the captured steps computed, see `capture.py`
checkpoints/      the state at the step that is saved
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regauge import jsonl
from regauge.data.loader import in_turn
from regauge.errors import SettingsError
from regauge.training import task_schedule
from regauge.training.checkpointing import restore, save_checkpoint
from regauge.training.defaults import resolve_defaults
from regauge.training.divergence.capture import Capture
from regauge.training.optimizer_step import optimizer_step
from regauge.training.run_setup import set_up

if TYPE_CHECKING:
    from regauge.processes import World
    from regauge.testing.faults import FaultInjector
    from regauge.training.context import RunContext
    from regauge.training.divergence.settings import Replay, Steps
    from regauge.training.state import TrainState

RECORD = "replay.jsonl"


def replay(settings: Replay, world: World) -> dict[str, Any]:
    """Compute steps again in `output.folder`; every process calls this."""
    task_schedule.read_manifests(settings)
    resolved = resolve_defaults(settings, world)
    joined = dist.is_initialized()
    options, folder = settings.replay, Path(settings.output.folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = torch.float64 if options.float64 else None
    injector = _fault_injector(options.faults, folder, world)
    context, state = set_up(resolved, world, dtype=dtype, injector=injector)
    try:
        if options.state is not None:
            restore(context, state, Path(options.state))
        if state.step >= options.until:
            raise SettingsError(
                f"{options.state} is at step {state.step}, beyond the steps to compute again",
                "name an earlier checkpoint",
            )
        state.lr_schedule.seek(state.step)
        _compute(context, state, options, folder)
        context.saver.wait()
    finally:
        if dist.is_initialized() and not joined:
            dist.destroy_process_group()
    return {"output": str(folder), "steps": state.step}


def _fault_injector(plan: str | None, folder: Path, world: World) -> FaultInjector | None:
    if plan is None:
        return None
    from regauge.testing import faults

    return faults.FaultInjector.read(plan, folder / faults.RECORD, world.rank)


def _compute(context: RunContext, state: TrainState, options: Steps, folder: Path) -> None:
    steps = in_turn(context.read_batches, state.step, options.until, workers=0, ahead=0)
    context.metrics.begin()
    for arrays in steps:
        if state.step == options.save:
            save_checkpoint(context, state, {})
        batches = [
            {name: torch.from_numpy(value).to(context.device) for name, value in batch.items()}
            for batch in arrays
        ]
        with context.hooks.around_step(state.step, batches):
            if state.step in options.watch:
                capture = Capture(context, state, options.noise)
                with capture.watching(batches):
                    totals, norm = optimizer_step(context, state, batches)
                capture.write(folder, state.step)
            else:
                totals, norm = optimizer_step(context, state, batches)
        loss, weight = totals.tolist()
        state.step += 1
        if context.world.first:
            line = {"step": state.step, "loss": loss / max(weight, 1e-9), "norm": float(norm)}
            jsonl.append(folder / RECORD, line)
