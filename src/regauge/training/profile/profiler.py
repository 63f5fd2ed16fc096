"""Profiles some steps on process 0 with torch's profiler, and writes a report.

The first `SKIPPED_STEPS` steps of an attempt compile and allocate; the next `PROFILED_STEPS` are
profiled. Hooks annotate the modules, so a step's operations are unchanged. Modules inside
compiled blocks are not annotated, because that would recompile the block. Their time counts as
block time.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch.profiler import profile, record_function, supported_activities

from regauge.config import FORMAT
from regauge.config.output_files import PROFILE
from regauge.data.loader import count_tokens
from regauge.supervision.health.device import measure_memory_bandwidth
from regauge.system.files import write_atomic
from regauge.system.hooks import Hook
from regauge.system.json_files import write_sealed
from regauge.system.log import logger
from regauge.system.processes import restore_environment
from regauge.training.compile.decision import compiled_parts
from regauge.training.profile.advice import ProfileReport
from regauge.training.profile.trace import MODULE, PART, STEP, build_breakdown, read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from regauge.accelerators import Batch
    from regauge.training.context import RunContext
    from regauge.training.profile.trace import Breakdown
    from regauge.training.state import TrainState
    from regauge.training.strategies import ShardedModel

TRACE = "profile-trace.json.gz"
KINETO_LOG_LEVEL = "KINETO_LOG_LEVEL", "6"
"""Variable that keeps the profiler library from writing to the terminal."""
SKIPPED_STEPS, PROFILED_STEPS = 3, 3
STEP_METHODS = {
    "gradient_norm": "gradient norm",
    "scale_gradients": "gradient scaling",
    "sync_weights": "weight synchronization",
    "clear_gradients": "gradient clearing",
}
"""`ShardedModel` method that is part of a step -> name in a report."""


class StepProfiler(Hook):
    """Profiles some steps on this process, and writes the report after the last one."""

    def __init__(self, context: RunContext, state: TrainState) -> None:
        self._context, self._state = context, state
        steps_left = context.total_steps - state.step
        self._first = state.step + min(SKIPPED_STEPS, max(0, steps_left - 1))
        self._last = min(self._first + PROFILED_STEPS, context.total_steps)
        self._annotations = ExitStack()
        self._profiler: profile | None = None
        self._data_wait = context.ledger.seconds["data_wait"]
        """Seconds spent waiting for data before the first profiled step."""
        self._previous_step_seconds = 0.0
        self._counts = [0, 0]

    @contextmanager
    def around_step(self, step: int, batches: list[Batch]) -> Iterator[None]:
        began = time.perf_counter()
        if step == self._first:
            self._start()
        if self._profiler is None:
            yield
            self._previous_step_seconds = time.perf_counter() - began
            self._data_wait = self._context.ledger.seconds["data_wait"]
            return
        with record_function(STEP):
            yield
            self._context.accelerator.synchronize()
        for batch in batches:
            names = {"segments", "packed"} & batch.keys()
            arrays = {name: batch[name].cpu().numpy() for name in names}
            counts = zip(self._counts, count_tokens(arrays), strict=True)
            self._counts = [total + count for total, count in counts]
        if self._state.step == self._last:
            with self._context.hooks.phase("evaluate"):
                self._write(self._profiler)

    def close(self) -> None:
        """Stop the profiler if the run ends before the last profiled step."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        self._annotations.close()

    def _start(self) -> None:
        self._context.accelerator.synchronize()
        self._annotations.enter_context(annotate_modules(self._state.model))
        with restore_environment():
            os.environ.setdefault(*KINETO_LOG_LEVEL)
            self._profiler = profile(activities=supported_activities(), record_shapes=True)
            self._profiler.start()

    def _write(self, profiler: profile) -> None:
        context, state = self._context, self._state
        data_seconds = context.ledger.seconds["data_wait"] - self._data_wait
        self.close()
        with TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            text = path.read_bytes()
        write_atomic(context.folder / TRACE, gzip.compress(text, compresslevel=3))
        trace = read_trace(json.loads(text), context.accelerator.distributed_backend())
        breakdown = build_breakdown(trace, data_seconds)
        report = build_report(context, state, breakdown, *self._counts)
        document = {
            "format": FORMAT,
            "steps": [self._first + 1, self._last],
            "unprofiled_step_seconds": self._previous_step_seconds,
            "trace_file": TRACE,
            **report.document,
        }
        write_sealed(context.folder / PROFILE, document)
        for line in report.lines:
            logger.info("%s", line)


@contextmanager
def annotate_modules(model: ShardedModel) -> Iterator[None]:
    """Annotate modules, and methods that are part of a step, in the trace.

    Compiled blocks are annotated as a whole, others together with their children.
    """
    root = model.module
    blocks = compiled_parts(root)
    in_blocks = {id(module) for block in blocks for module in block.modules()}
    eager = [block for block in blocks if block._compiled_call_impl is None]  # noqa: SLF001 - no public name
    eager_ids = {id(module) for block in eager for module in (block, *block.children())}
    compiled_ids = {id(block) for block in blocks} - eager_ids
    with ExitStack() as stack:
        for name, module in root.named_modules():
            if id(module) in compiled_ids:
                stack.enter_context(_annotate_method(module, "_compiled_call_impl", MODULE + name))
            elif id(module) in eager_ids or id(module) not in in_blocks:
                _annotate_module(module, MODULE + (name or type(module).__name__), stack)
        for method, name in STEP_METHODS.items():
            stack.enter_context(_annotate_method(model, method, PART + name))
        yield


@contextmanager
def _annotate_method(owner: Any, method: str, label: str) -> Iterator[None]:
    function, is_own_attribute = getattr(owner, method), method in vars(owner)

    @wraps(function)
    def call_annotated(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return function(*args, **kwargs)

    setattr(owner, method, call_annotated)
    yield
    if is_own_attribute:
        setattr(owner, method, function)
    else:
        delattr(owner, method)


def _annotate_module(module: nn.Module, label: str, stack: ExitStack) -> None:
    annotations: list[record_function] = []

    def enter(*_: Any) -> None:
        annotations.append(record_function(label))
        annotations[-1].__enter__()

    def leave(*_: Any) -> None:
        if annotations:
            annotations.pop().__exit__(None, None, None)

    stack.callback(module.register_forward_pre_hook(enter).remove)
    stack.callback(module.register_forward_hook(leave, always_call=True).remove)


def build_report(
    context: RunContext, state: TrainState, breakdown: Breakdown, tokens: int, computed_tokens: int
) -> ProfileReport:
    """Report on this process's profiled steps.

    `tokens` are the real tokens in these steps, `computed_tokens` include padding.
    """
    execution = context.settings.execution
    peak = context.mfu.chip.flops_per_second.get(execution.precision)
    preferred = context.accelerator.precisions()[0]
    preferred_peak = context.accelerator.chip_peak(preferred).flops_per_second.get(preferred)
    speedup = preferred_peak / peak if preferred_peak and peak else None
    return ProfileReport(
        breakdown=breakdown,
        settings=context.settings,
        chip=context.mfu.chip,
        peak=peak,
        faster_precision=(preferred, speedup) if speedup is not None else None,
        bytes_per_second=measure_memory_bandwidth(context.accelerator, context.device),
        model_flops=tokens * context.mfu.flops_per_token,
        padding_fraction=1 - tokens / max(computed_tokens, 1),
        num_weights=sum(value.numel() for value in state.model.masters().values()),
        num_processes=context.world.size,
    )
