"""Whether the blocks of a run are compiled: where that saves more time than it takes.

Where the settings leave it open, it is decided once, before the first step, and the run keeps it:
by the steps that there will be, and by microbatches of no rows that are timed without and with.
What all processes measured is put together, so that they decide alike.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch._dynamo.exc import TorchDynamoException

from regauge.log import logger
from regauge.models import architectures as models
from regauge.models.losses import LogitGradients
from regauge.training.compile.warmup import build_empty_batches, raise_recompile_limit
from regauge.training.gradients import all_reduce_sum

if TYPE_CHECKING:
    from torch import nn

    from regauge.accelerators import Accelerator
    from regauge.training.context import RunContext
    from regauge.training.settings import Training
    from regauge.training.state import TrainState

SHORT_SECONDS = 30.0
"""A run that takes less for each graph that it needs is not compiled, and that is not tried: it
takes about a third of it to make one."""
FROM_PEAK = 20.0
"""Times the seconds at the chip's peak that a run takes at most, unless it is short anyway."""
TIMED = 3
MODES = 2
"""Of each shape, blocks are compiled with gradients and without."""


class Trial(NamedTuple):
    """Seconds, of all processes together."""

    eager: float
    """Of a step as it is."""
    compiled: float
    """Of a step that is compiled."""
    once: float
    """That compiling one shape took."""


def compile_parts(module: nn.Module, accelerator: Accelerator) -> None:
    """Let a module's parts be compiled when they are computed next."""
    backend, options = accelerator.compile_backend(), accelerator.compile_options()
    for part in compiled_parts(module):
        varying = accelerator.symbolic and type(part) is LogitGradients
        part.compile(dynamic=varying, backend=backend, options=options or None)


def compiled_parts(module: nn.Module) -> list[nn.Module]:
    """Return what is compiled of a module: its blocks, and what gives logits their gradients."""
    return [
        *models.blocks(module),
        *(part for part in module.modules() if type(part) is LogitGradients),
    ]


def resolve_compile(context: RunContext, state: TrainState) -> Training:
    """Return the settings with `execution.compile` resolved; every process calls this."""
    settings = context.settings
    if settings.execution.compile != "auto":
        return settings
    with context.hooks.phase("compile"):
        is_compiled, reason = _decide(context, state)
    kind = "blocks" if is_compiled else "no"
    if context.world.first:
        logger.info("torch.compile %s: %s", "on" if is_compiled else "off", reason)
    execution = settings.execution.model_copy(update={"compile": kind})
    return settings.model_copy(update={"execution": execution})


def is_worthwhile(trial: Trial, steps: int, graphs: int) -> tuple[bool, str]:
    """Return whether compiling pays for a run of some steps that needs so many graphs, and why."""
    saved = (trial.eager - trial.compiled) * steps
    costs = trial.once * (graphs - 1)  # one is made already
    took = f"a step takes {trial.compiled:.3g} s compiled and {trial.eager:.3g} s else"
    return saved > costs, f"{took}, {steps:,} steps; {costs:.0f} s more for other graphs"


def _decide(context: RunContext, state: TrainState) -> tuple[bool, str]:
    steps, least = context.total_steps, _least_seconds(context)
    graphs = MODES * len(context.shapes)
    short = SHORT_SECONDS * graphs
    if least is not None and FROM_PEAK * least < short:
        return False, f"the run takes less than {short:.0f} s"
    (eager,) = _together(context, _step_seconds(context, state))
    if eager * steps < short:
        return False, f"the run takes about {eager * steps:.0f} s, and needs {graphs} graphs"
    module = state.model.module
    raise_recompile_limit(context, state)
    compile_parts(module, context.accelerator)
    began = time.perf_counter()
    try:
        compiled = _step_seconds(context, state)
    except TorchDynamoException as error:
        compiled, failed = 0.0, f"it fails: {str(error).strip().partition(chr(10))[0]}"
    else:
        failed = ""
    once = time.perf_counter() - began - compiled * TIMED
    compiled, once, failures = _together(context, compiled, once, float(bool(failed)))
    works, reason = is_worthwhile(Trial(eager, compiled, once), steps, graphs)
    if failures or not works:
        for part in compiled_parts(module):
            part._compiled_call_impl = None  # noqa: SLF001 - what Module.compile sets
    return works and not failures, failed or reason


def _least_seconds(context: RunContext) -> float | None:
    """Return what a run takes at the chip's peak; None where that is not known."""
    peak = context.mfu.chip.flops_per_second.get(context.settings.execution.precision)
    if peak is None:
        return None
    turns = zip(context.task_schedule.weights, context.tasks, strict=True)
    tokens = sum(
        weight * each.batch.rows * each.task.slots_per_row() * each.ladder[-1]
        for weight, each in turns
    ) / sum(context.task_schedule.weights)
    flops = tokens * context.mfu.flops_per_token * context.total_steps
    return flops / (peak * context.world.size)


def _step_seconds(context: RunContext, state: TrainState) -> float:
    """Return the seconds of this process's microbatches of a step, of the first task's longest."""
    task = context.tasks[0]
    size = (1, task.batch.microbatch)
    one = torch.ones((), device=context.device)
    taken = []
    for _ in range(TIMED + 1):  # the first one makes graphs and room
        batches = build_empty_batches(context, task, task.feed, task.ladder[-1], size)
        began = time.perf_counter()
        task.gradients.accumulate_gradients(batches, one)
        state.model.clear_gradients()
        context.accelerator.synchronize()
        taken.append(time.perf_counter() - began)
    own = -(-task.batch.microbatches // context.world.size)
    return own * statistics.median(taken[1:])


def _together(context: RunContext, *own: float) -> list[float]:
    """Return the means over all processes, equal on each."""
    found = all_reduce_sum(torch.tensor(own).to(context.device))
    values: list[float] = (found / context.world.size).tolist()
    return values
