"""Decides whether to compile a model's blocks: only if that saves more time than it takes.

If `execution.compile` is "auto", the decision is made once, before the first step, and kept on
resume. It depends on the number of steps, and on the times of an eager and a compiled step with
empty microbatches of the largest length. The two alternate, and the shortest time of each counts.
It is multiplied by the expected text length with padding, relative to the largest length: eager
batches have less padding, because their texts are packed into rows. Times are averaged over all
processes, so all decide equally. If the measurement would take more than `MAX_DECISION_SHARE`
of the run, nothing is compiled.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._dynamo.exc import TorchDynamoException

from regauge.data.buckets import BatchForm
from regauge.models import architectures
from regauge.models.losses import LogitGradients
from regauge.system.log import logger
from regauge.system.wording import format_count
from regauge.training.compile.warmup import build_empty_batches, raise_recompile_limit
from regauge.training.gradients import all_reduce_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from regauge.accelerators import Accelerator
    from regauge.training.context import RunContext
    from regauge.training.settings import TrainSettings
    from regauge.training.state import TrainState
    from regauge.training.task_runtime import TaskRuntime

MIN_SECONDS_PER_GRAPH = 30.0
"""Shorter runs, per graph, are not compiled."""
SECONDS_PER_GRAPH = 10.0
"""Expected time to compile one graph on an idle machine."""
MAX_DECISION_SHARE = 0.03
"""Fraction of the expected run time spent on measuring."""
MAX_SLOWDOWN_FROM_PEAK = 20.0
"""Largest expected run time, relative to the run time at the chip's peak."""
TIMED_STEPS = 3
"""Timed steps per kind, after one that allocates or compiles."""
GRAPHS_PER_SHAPE = 2
"""Blocks are compiled with and without gradients."""


class LengthShares(NamedTuple):
    """Expected text length with padding, relative to the largest length."""

    eager: float
    compiled: float


class CompileTiming(NamedTuple):
    """Seconds, averaged over all processes."""

    eager_seconds: float
    compiled_seconds: float
    compile_seconds: float
    """To compile one shape."""

    def scale(self, shares: LengthShares) -> CompileTiming:
        """Convert times measured with batches of the largest length to expected times."""
        return self._replace(
            eager_seconds=self.eager_seconds * shares.eager,
            compiled_seconds=self.compiled_seconds * shares.compiled,
        )


def compile_parts(module: nn.Module, accelerator: Accelerator) -> None:
    """Set up a module's parts for torch.compile; the next call of each compiles it."""
    backend, options = accelerator.compile_backend(), accelerator.compile_options()
    for part in compiled_parts(module):
        is_dynamic = accelerator.has_dynamic_shapes and type(part) is LogitGradients
        part.compile(dynamic=is_dynamic, backend=backend, options=options or None)


def compiled_parts(module: nn.Module) -> list[nn.Module]:
    """Return the compiled submodules: the blocks, and the loss on logits."""
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
    run_step = _build_step(context, state)
    run_step()  # the first pass allocates
    eager, slowdown = _average_over_ranks(context, *_time_alone(context, run_step))
    task = context.tasks[0]  # the timed one
    shares = measure_length_shares(context, task)
    run_seconds = eager * shares.eager * num_steps
    if run_seconds < limit:
        estimate = f"estimated run time {run_seconds:.0f} s"
        return False, f"{estimate} < {limit:.0f} s for {format_count(num_graphs, 'graph')}"
    if problem := find_cost_problem(eager, slowdown, run_seconds):
        return False, problem
    if context.world.is_main_process:
        seconds = decision_seconds(eager, slowdown)
        logger.info("torch.compile: one graph is compiled and timed, about %.0f s", seconds)
    raise_recompile_limit(context, state)
    timing, failure = _time_compiled(context, state, run_step)
    is_faster, reason = is_worthwhile(timing.scale(shares), num_steps, num_graphs)
    if failure or not is_faster:
        _set_compiled(state.model.module, dict.fromkeys(compiled_parts(state.model.module)))
    return is_faster and not failure, failure or reason


def decision_seconds(eager_seconds: float, slowdown: float) -> float:
    """Return the expected seconds to compile and time one graph.

    `slowdown` is the factor by which other programs delay this process.
    """
    return SECONDS_PER_GRAPH * slowdown + 2 * TIMED_STEPS * eager_seconds


def measure_length_shares(context: RunContext, task: TaskRuntime) -> LengthShares:
    """Count the tokens in a task's batches, relative to batches of the largest length."""
    settings, manifest = context.settings, task.manifest
    data = settings.task_configs[context.tasks.index(task)].data

    def measure(*, has_any_shape: bool) -> float:
        form = BatchForm(task.batch.rows, task.batch.microbatch, has_any_shape)
        counts = task.task.sample_tokens(data, manifest, form, seed=settings.seed)
        per_row = task.task.sequences_per_row(manifest) * task.bucket_lengths[-1]
        return counts.computed / (counts.rows * per_row)

    is_dynamic = context.accelerator.has_dynamic_shapes and task.can_pack
    return LengthShares(measure(has_any_shape=is_dynamic), measure(has_any_shape=False))


def find_cost_problem(eager_seconds: float, slowdown: float, run_seconds: float) -> str | None:
    """Return why the measurement would take too long, or None."""
    cost = decision_seconds(eager_seconds, slowdown)
    if cost <= MAX_DECISION_SHARE * run_seconds:
        return None
    share = f"{100 * MAX_DECISION_SHARE:g} % of the estimated run time, {run_seconds:.0f} s"
    return f"to compile and time one graph takes about {cost:.0f} s, more than {share}"


def _build_step(context: RunContext, state: TrainState) -> Callable[[], float]:
    """Return a function that runs a step and returns its seconds on this process.

    The step has the first task's largest shape, without rows.
    """
    task = context.tasks[0]
    size = (1, task.batch.microbatch)
    one = torch.ones((), device=context.device)
    local_microbatches = -(-task.batch.microbatches // context.world.size)

    def run_step() -> float:
        batches = build_empty_batches(context, task, task.loader, task.bucket_lengths[-1], size)
        began = time.perf_counter()
        task.gradients.accumulate_gradients(batches, one)
        state.model.clear_gradients()
        context.accelerator.synchronize()
        return local_microbatches * (time.perf_counter() - began)

    return run_step


def _time_alone(context: RunContext, run_step: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds per step, and the slowdown by other programs: 1 on an idle machine."""
    began, began_process = time.perf_counter(), time.process_time()
    seconds = min(run_step() for _ in range(TIMED_STEPS))
    if not context.accelerator.on_host:
        return seconds, 1.0
    elapsed = time.perf_counter() - began
    used = (time.process_time() - began_process) / torch.get_num_threads()
    return seconds, max(1.0, elapsed / max(used, 1e-9))


def _time_compiled(
    context: RunContext, state: TrainState, run_step: Callable[[], float]
) -> tuple[CompileTiming, str]:
    """Compile one graph; return its times and eager step times, and why it failed, if it did.

    The model's parts stay compiled.
    """
    module = state.model.module
    compile_parts(module, context.accelerator)
    compiled = {part: part._compiled_call_impl for part in compiled_parts(module)}  # noqa: SLF001
    eager_seconds, compiled_seconds = [], []
    failure, began = "", time.perf_counter()
    try:
        run_step()
    except TorchDynamoException as error:
        failure = f"it fails: {str(error).strip().partition(chr(10))[0]}"
    compile_seconds = time.perf_counter() - began
    for _ in range(TIMED_STEPS):
        _set_compiled(module, dict.fromkeys(compiled))
        eager_seconds.append(run_step())
        _set_compiled(module, compiled)
        compiled_seconds.append(0.0 if failure else run_step())
    eager, best, compile_seconds, failures = _average_over_ranks(
        context, min(eager_seconds), min(compiled_seconds), compile_seconds, float(bool(failure))
    )
    failure = failure or ("it fails on another process" if failures else "")
    return CompileTiming(eager, best, max(0.0, compile_seconds - best)), failure


def _set_compiled(module: nn.Module, calls: Mapping[nn.Module, Any]) -> None:
    """Set the compiled function of each module part; None undoes `Module.compile`."""
    for part in compiled_parts(module):
        part._compiled_call_impl = calls[part]  # noqa: SLF001


def _min_run_seconds(context: RunContext) -> float | None:
    peak = context.mfu.chip.flops_per_second.get(context.settings.execution.precision)
    if peak is None:
        return None
    tokens = [
        task.batch.rows * task.task.slots_per_row() * task.bucket_lengths[-1]
        for task in context.tasks
    ]
    flops = context.task_schedule.mean(tokens) * context.mfu.flops_per_token * context.total_steps
    return flops / (peak * context.world.size)


def _average_over_ranks(context: RunContext, *local_values: float) -> list[float]:
    """Average each value over all processes; every process gets the means."""
    totals = all_reduce_sum(torch.tensor(local_values).to(context.device))
    means: list[float] = (totals / context.world.size).tolist()
    return means
