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
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch.profiler import profile, record_function, supported_activities

from regauge.checkpoint.layout import write_json
from regauge.config import FORMAT
from regauge.health.device import memory_rate
from regauge.log import logger
from regauge.processes import own_environment
from regauge.training.compile import decision
from regauge.training.metrics import tokens_and_slots
from regauge.training.profile.advice import Observed
from regauge.training.profile.breakdown import times
from regauge.training.profile.trace import MODULE, PART, STEP, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import nn

    from regauge.data.batches import Arrays
    from regauge.training.profile.breakdown import Times
    from regauge.training.session import Session

FILE, TRACE = "profile.json", "profile-trace.json.gz"
QUIET = "KINETO_LOG_LEVEL", "6"
"""What the profiler's library reads when it is first used: else it writes to the terminal."""
BEFORE, STEPS = 3, 3
"""Steps of an attempt that are left alone first, and those that are watched."""
OF_A_STEP = {
    "gradient_norm": "gradient norm",
    "scale_gradients": "gradients scaled",
    "publish": "weights published",
    "clear_gradients": "gradients cleared",
}
"""Methods of a prepared module that are parts of a step."""


@contextmanager
def watching(
    session: Session,
) -> Iterator[Callable[[list[Arrays]], AbstractContextManager[None]]]:
    """Yield what surrounds each step: a profile in the first process, where one is asked for."""
    if not (session.settings.profile and session.world.first):
        yield lambda _: nullcontext()
        return
    closely = Closely(session)
    try:
        yield closely.step
    finally:
        closely.close()


class Closely:
    """Watches the steps of an attempt whose turn it is, and writes what was seen after the last."""

    def __init__(self, session: Session) -> None:
        self._session = session
        left = session.total_steps - session.step
        self._first = session.step + min(BEFORE, max(0, left - 1))
        self._last = min(self._first + STEPS, session.total_steps)
        self._marks = ExitStack()
        self._profiler: profile | None = None
        self._waited = session.ledger.seconds["data_wait"]
        """Before the first step that is watched had its rows."""
        self._usual = 0.0
        self._counts = [0, 0]

    @contextmanager
    def step(self, arrays: list[Arrays]) -> Iterator[None]:
        """Surround a step."""
        session, began = self._session, time.perf_counter()
        if session.step == self._first:
            self._begin()
        if self._profiler is None:
            yield
            self._usual = time.perf_counter() - began
            self._waited = session.ledger.seconds["data_wait"]
            return
        with record_function(STEP):
            yield
            session.accelerator.synchronize()
        for batch in arrays:
            counts = zip(self._counts, tokens_and_slots(batch), strict=True)
            self._counts = [before + found for before, found in counts]
        if session.step == self._last:
            with session.ledger.spend("evaluate"):
                self._end(self._profiler)

    def close(self) -> None:
        """Leave the run as it was, where it ended before the last step that was to be watched."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        self._marks.close()

    def _begin(self) -> None:
        session = self._session
        session.accelerator.synchronize()
        self._marks.enter_context(marked(session))
        with own_environment():
            os.environ.setdefault(*QUIET)
            self._profiler = profile(activities=supported_activities(), record_shapes=True)
            self._profiler.start()

    def _end(self, profiler: profile) -> None:
        """Write the trace and what it says."""
        session = self._session
        waited = session.ledger.seconds["data_wait"] - self._waited
        self.close()
        with TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(file))
            text = file.read_bytes()
        with gzip.open(session.folder / TRACE, "wb", compresslevel=3) as packed:
            packed.write(text)
        found = times(read(json.loads(text), session.accelerator.collectives()), waited)
        seen = observed(session, found, *self._counts)
        document = {
            "format": FORMAT,
            "steps": [self._first + 1, self._last],
            "seconds_of_the_step_before": self._usual,
            "trace": TRACE,
            **seen.document,
        }
        write_json(session.folder / FILE, document)
        for line in seen.sentences:
            logger.info("%s", line)


@contextmanager
def marked(session: Session) -> Iterator[None]:
    """Mark the modules of a run, and what a step does beside them, in the trace."""
    module, prepared = session.prepared.module, session.prepared
    parts = decision.parts(module)
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
            stack.enter_context(_within(prepared, method, PART + name))
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


def observed(session: Session, found: Times, tokens: int, slots: int) -> Observed:
    """Return what the profiled steps of this process say, beside its chip."""
    execution = session.settings.execution
    peak = session.chip.flops_per_second.get(execution.precision)
    offered = session.accelerator.precisions()[0]
    faster = session.accelerator.chip(offered).flops_per_second.get(offered)
    return Observed(
        times=found,
        settings=session.settings,
        chip=session.chip,
        peak=peak,
        faster=(offered, faster / peak) if faster and peak else None,
        bytes_per_second=memory_rate(session.accelerator, session.device),
        model_flops=tokens * session.flops_per_token,
        padding=1 - tokens / max(slots, 1),
        weights=sum(value.numel() for value in session.prepared.masters().values()),
        processes=session.world.size,
    )
