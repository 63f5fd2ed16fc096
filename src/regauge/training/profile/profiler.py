"""Some steps of an attempt, looked at closely: where they go, and what to change first.

The first process is watched by torch's profiler while it does `STEPS` steps, after some that make
graphs and room. Modules are marked from outside: no operation of a step is another one. Nothing
within a compiled block is marked, since it would be compiled anew; it counts as that block.
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
from regauge.files import write_json
from regauge.health.device import memory_rate
from regauge.hooks import Hook
from regauge.log import logger
from regauge.processes import own_environment
from regauge.training.compile import decision
from regauge.training.metrics import tokens_and_slots
from regauge.training.profile.advice import ProfileReport
from regauge.training.profile.breakdown import build_breakdown
from regauge.training.profile.trace import MODULE, PART, STEP, read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from regauge.accelerators import Batch
    from regauge.strategies import ShardedModel
    from regauge.training.context import RunContext
    from regauge.training.profile.breakdown import Breakdown
    from regauge.training.state import TrainState

FILE, TRACE = "profile.json", "profile-trace.json.gz"
QUIET = "KINETO_LOG_LEVEL", "6"
"""What the profiler's library reads when it is first used: else it writes to the terminal."""
SKIPPED_STEPS, PROFILED_STEPS = 3, 3
"""Steps of an attempt that are skipped first, and steps that are profiled then."""
OF_A_STEP = {
    "gradient_norm": "gradient norm",
    "scale_gradients": "gradients scaled",
    "sync_weights": "weights published",
    "clear_gradients": "gradients cleared",
}
"""Methods of a prepared module that are parts of a step."""


class StepProfiler(Hook):
    """Profiles some steps of this process, and writes the report after the last of them."""

    def __init__(self, context: RunContext, state: TrainState) -> None:
        self._context, self._state = context, state
        steps_left = context.total_steps - state.step
        self._first = state.step + min(SKIPPED_STEPS, max(0, steps_left - 1))
        self._last = min(self._first + PROFILED_STEPS, context.total_steps)
        self._annotations = ExitStack()
        self._profiler: profile | None = None
        self._data_wait = context.ledger.seconds["data_wait"]
        """Seconds until the first profiled step had its rows."""
        self._seconds_before = 0.0
        self._counts = [0, 0]

    @contextmanager
    def around_step(self, step: int, batches: list[Batch]) -> Iterator[None]:
        began = time.perf_counter()
        if step == self._first:
            self._start()
        if self._profiler is None:
            yield
            self._seconds_before = time.perf_counter() - began
            self._data_wait = self._context.ledger.seconds["data_wait"]
            return
        with record_function(STEP):
            yield
            self._context.accelerator.synchronize()
        for batch in batches:
            arrays = {"segments": batch["segments"].cpu().numpy()}
            counts = zip(self._counts, tokens_and_slots(arrays), strict=True)
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
        with own_environment():
            os.environ.setdefault(*QUIET)
            self._profiler = profile(activities=supported_activities(), record_shapes=True)
            self._profiler.start()

    def _write(self, profiler: profile) -> None:
        """Write the trace and the report."""
        context, state = self._context, self._state
        waited = context.ledger.seconds["data_wait"] - self._data_wait
        self.close()
        with TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(file))
            text = file.read_bytes()
        with gzip.open(context.folder / TRACE, "wb", compresslevel=3) as packed:
            packed.write(text)
        trace = read(json.loads(text), context.accelerator.collectives())
        report = build_report(context, state, build_breakdown(trace, waited), *self._counts)
        document = {
            "format": FORMAT,
            "steps": [self._first + 1, self._last],
            "seconds_of_the_step_before": self._seconds_before,
            "trace": TRACE,
            **report.document,
        }
        write_json(context.folder / FILE, document)
        for line in report.sentences:
            logger.info("%s", line)


@contextmanager
def annotate_modules(model: ShardedModel) -> Iterator[None]:
    """Mark the modules of a run, and what a step does beside them, in the trace."""
    module = model.module
    parts = decision.compiled_parts(module)
    inside = {id(each) for part in parts for each in part.modules()}
    plain = [part for part in parts if part._compiled_call_impl is None]  # noqa: SLF001 - no public name
    own = {id(each) for part in plain for each in (part, *part.children())}
    compiled = {id(part) for part in parts} - own
    with ExitStack() as stack:
        for name, part in module.named_modules():
            if id(part) in compiled:
                stack.enter_context(_within(part, "_compiled_call_impl", MODULE + name))
            elif id(part) in own or id(part) not in inside:
                _hooked(part, MODULE + (name or type(part).__name__), stack)
        for method, name in OF_A_STEP.items():
            stack.enter_context(_within(model, method, PART + name))
        yield


@contextmanager
def _within(owner: Any, method: str, mark: str) -> Iterator[None]:
    """Let a method of one object be computed within a mark."""
    plain, own = getattr(owner, method), method in vars(owner)

    @wraps(plain)
    def inside(*args: Any, **named: Any) -> Any:
        with record_function(mark):
            return plain(*args, **named)

    setattr(owner, method, inside)
    yield
    if own:
        setattr(owner, method, plain)
    else:
        delattr(owner, method)


def _hooked(part: nn.Module, mark: str, stack: ExitStack) -> None:
    """Mark the forward pass of a module, until the stack is closed."""
    around: list[record_function] = []

    def enter(*_: Any) -> None:
        around.append(record_function(mark))
        around[-1].__enter__()

    def leave(*_: Any) -> None:
        if around:
            around.pop().__exit__(None, None, None)

    stack.callback(part.register_forward_pre_hook(enter).remove)
    stack.callback(part.register_forward_hook(leave, always_call=True).remove)


def build_report(
    context: RunContext, state: TrainState, found: Breakdown, tokens: int, slots: int
) -> ProfileReport:
    """Return what the profiled steps of this process say, beside its chip."""
    execution = context.settings.execution
    peak = context.mfu.chip.flops_per_second.get(execution.precision)
    offered = context.accelerator.precisions()[0]
    faster = context.accelerator.chip(offered).flops_per_second.get(offered)
    return ProfileReport(
        times=found,
        settings=context.settings,
        chip=context.mfu.chip,
        peak=peak,
        faster=(offered, faster / peak) if faster and peak else None,
        bytes_per_second=memory_rate(context.accelerator, context.device),
        model_flops=tokens * context.mfu.flops_per_token,
        padding=1 - tokens / max(slots, 1),
        weights=sum(value.numel() for value in state.model.masters().values()),
        processes=context.world.size,
    )
