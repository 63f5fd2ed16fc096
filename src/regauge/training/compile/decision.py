"""Decides whether the blocks of a model are compiled: only if that saves more time than it takes.

If `execution.compile` is "auto", the decision is made once, before the first step, and kept on
resume. It depends on the number of steps, and on the times of an eager and a compiled step with
empty microbatches. Times are averaged over all processes, so that all of them decide equally.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch._dynamo.exc import TorchDynamoException

from regauge.log import logger
from regauge.models import architectures
from regauge.models.losses import LogitGradients
from regauge.training.compile.warmup import build_empty_batches, raise_recompile_limit
from regauge.training.gradients import all_reduce_sum
from regauge.wording import format_count

if TYPE_CHECKING:
    from torch import nn

    from regauge.accelerators import Accelerator
    from regauge.training.context import RunContext
    from regauge.training.settings import TrainSettings
    from regauge.training.state import TrainState

MIN_SECONDS_PER_GRAPH = 30.0
"""Shorter runs, per graph, are not compiled. Compiling one graph takes about a third of this."""
MAX_SLOWDOWN_FROM_PEAK = 20.0
"""Largest expected ratio of the run time to the run time at the peak of the chip."""
TIMED_STEPS = 3
GRAPHS_PER_SHAPE = 2
"""Blocks are compiled with gradients and without gradients."""


class CompileTiming(NamedTuple):
    """Measured seconds, averaged over all processes."""

    eager_seconds: float
    """Seconds of an eager step."""
    compiled_seconds: float
    """Seconds of a compiled step."""
    compile_seconds: float
    """Seconds of compiling one shape."""


def compile_parts(module: nn.Module, accelerator: Accelerator) -> None:
    """Set up the parts of a module for torch.compile; the next call of each compiles it."""
    backend, options = accelerator.compile_backend(), accelerator.compile_options()
    for part in compiled_parts(module):
        is_dynamic = accelerator.has_dynamic_shapes and type(part) is LogitGradients
        part.compile(dynamic=is_dynamic, backend=backend, options=options or None)


def compiled_parts(module: nn.Module) -> list[nn.Module]:
    """Return the submodules that are compiled: the blocks, and the loss on logits."""
    return [
        *architectures.find_blocks(module),
        *(part for part in module.modules() if type(part) is LogitGradients),
    ]


def resolve_compile(context: RunContext, state: TrainState) -> TrainSettings:
    """Return the settings with `execution.compile` resolved; every process calls this."""
    settings = context.settings
    if settings.execution.compile != "auto":
        return settings
    with context.hooks.phase("compile"):
        is_compiled, reason = _decide(context, state)
    kind = "blocks" if is_compiled else "off"
    if context.world.is_main_process:
        logger.info("torch.compile %s: %s", "on" if is_compiled else "off", reason)
    execution = settings.execution.model_copy(update={"compile": kind})
    return settings.model_copy(update={"execution": execution})


def is_worthwhile(timing: CompileTiming, num_steps: int, num_graphs: int) -> tuple[bool, str]:
    """Return whether the saved seconds exceed the seconds of compiling, and the reason as text."""
    saved = (timing.eager_seconds - timing.compiled_seconds) * num_steps
    cost = timing.compile_seconds * (num_graphs - 1)  # the first graph is compiled already
    steps = f"compiled {timing.compiled_seconds:.3g} s, eager {timing.eager_seconds:.3g} s"
    total = format_count(num_steps, "step")
    reason = f"a step takes {steps}; {total}; {cost:.0f} s to compile other graphs"
    return saved > cost, reason


def _decide(context: RunContext, state: TrainState) -> tuple[bool, str]:
    """Return whether to compile, and the reason; compiled parts stay set up if so."""
    num_steps, min_seconds = context.total_steps, _min_run_seconds(context)
    num_graphs = GRAPHS_PER_SHAPE * len(context.shapes)
    limit = MIN_SECONDS_PER_GRAPH * num_graphs
    if min_seconds is not None and MAX_SLOWDOWN_FROM_PEAK * min_seconds < limit:
        return False, f"estimated run time < {limit:.0f} s"
    (eager,) = _average_over_ranks(context, _time_step(context, state))
    if eager * num_steps < limit:
        estimate = f"estimated run time {eager * num_steps:.0f} s"
        return False, f"{estimate} < {limit:.0f} s for {format_count(num_graphs, 'graph')}"
    module = state.model.module
    raise_recompile_limit(context, state)
    compile_parts(module, context.accelerator)
    began = time.perf_counter()
    failure = ""
    try:
        compiled = _time_step(context, state)
    except TorchDynamoException as error:
        compiled, failure = 0.0, f"it fails: {str(error).strip().partition(chr(10))[0]}"
    compile_seconds = time.perf_counter() - began - compiled * TIMED_STEPS
    compiled, compile_seconds, failures = _average_over_ranks(
        context, compiled, compile_seconds, float(bool(failure))
    )
    timing = CompileTiming(eager, compiled, compile_seconds)
    is_faster, reason = is_worthwhile(timing, num_steps, num_graphs)
    if failures or not is_faster:
        for part in compiled_parts(module):
            part._compiled_call_impl = None  # noqa: SLF001 - undoes Module.compile
    return is_faster and not failures, failure or reason


def _min_run_seconds(context: RunContext) -> float | None:
    """Return the run time at the peak of the chip; None if the peak is unknown."""
    peak = context.mfu.chip.flops_per_second.get(context.settings.execution.precision)
    if peak is None:
        return None
    pairs = zip(context.task_schedule.weights, context.tasks, strict=True)
    tokens = sum(
        weight * task.batch.rows * task.task.slots_per_row() * task.bucket_lengths[-1]
        for weight, task in pairs
    ) / sum(context.task_schedule.weights)
    flops = tokens * context.mfu.flops_per_token * context.total_steps
    return flops / (peak * context.world.size)


def _time_step(context: RunContext, state: TrainState) -> float:
    """Return the seconds of a step on this process, with the largest shape of the first task."""
    task = context.tasks[0]
    size = (1, task.batch.microbatch)
    one = torch.ones((), device=context.device)
    seconds = []
    for _ in range(TIMED_STEPS + 1):  # the first pass compiles and allocates
        batches = build_empty_batches(context, task, task.loader, task.bucket_lengths[-1], size)
        began = time.perf_counter()
        task.gradients.accumulate_gradients(batches, one)
        state.model.clear_gradients()
        context.accelerator.synchronize()
        seconds.append(time.perf_counter() - began)
    local_microbatches = -(-task.batch.microbatches // context.world.size)
    return local_microbatches * statistics.median(seconds[1:])


def _average_over_ranks(context: RunContext, *local_values: float) -> list[float]:
    """Return the mean of each value over all processes; every process gets the same means."""
    totals = all_reduce_sum(torch.tensor(local_values).to(context.device))
    means: list[float] = (totals / context.world.size).tolist()
    return means
