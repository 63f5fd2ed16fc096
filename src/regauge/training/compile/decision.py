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
from regauge.models.losses import Slopes
from regauge.training.compile.warmup import empty, make_room
from regauge.training.gradients import summed

if TYPE_CHECKING:
    from torch import nn

    from regauge.accelerators import Accelerator
    from regauge.training.session import Session

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


def install(module: nn.Module, accelerator: Accelerator) -> None:
    """Let a module's parts be compiled when they are computed next."""
    backend, options = accelerator.compile_backend(), accelerator.compile_options()
    for part in parts(module):
        varying = accelerator.symbolic and type(part) is Slopes
        part.compile(dynamic=varying, backend=backend, options=options or None)


def parts(module: nn.Module) -> list[nn.Module]:
    """Return what is compiled of a module: its blocks, and what gives logits their gradients."""
    return [*models.blocks(module), *(part for part in module.modules() if type(part) is Slopes)]


def settle(session: Session) -> None:
    """Decide for a session whose settings leave it open; every process calls this."""
    execution = session.settings.execution
    if execution.compile != "auto":
        return
    with session.ledger.spend("compile"):
        works, reason = _decided(session)
    kind = "blocks" if works else "no"
    if session.world.first:
        logger.info("compile %s: %s", kind, reason)
    decided = execution.model_copy(update={"compile": kind})
    session.settings = session.settings.model_copy(update={"execution": decided})


def worth(trial: Trial, steps: int, graphs: int) -> tuple[bool, str]:
    """Return whether compiling pays for a run of some steps that needs so many graphs, and why."""
    saved = (trial.eager - trial.compiled) * steps
    costs = trial.once * (graphs - 1)  # one is made already
    took = f"a step takes {trial.compiled:.3g} s compiled and {trial.eager:.3g} s else"
    return saved > costs, f"{took}, {steps:,} steps; {costs:.0f} s more for other graphs"


def _decided(session: Session) -> tuple[bool, str]:
    steps, least = session.total_steps, _least_seconds(session)
    graphs = MODES * len(session.shapes)
    short = SHORT_SECONDS * graphs
    if least is not None and FROM_PEAK * least < short:
        return False, f"the run takes less than {short:.0f} s"
    (eager,) = _together(session, _step_seconds(session))
    if eager * steps < short:
        return False, f"the run takes about {eager * steps:.0f} s, and needs {graphs} graphs"
    module = session.prepared.module
    make_room(session)
    install(module, session.accelerator)
    began = time.perf_counter()
    try:
        compiled = _step_seconds(session)
    except TorchDynamoException as error:
        compiled, failed = 0.0, f"it fails: {str(error).strip().partition(chr(10))[0]}"
    else:
        failed = ""
    once = time.perf_counter() - began - compiled * TIMED
    compiled, once, failures = _together(session, compiled, once, float(bool(failed)))
    works, reason = worth(Trial(eager, compiled, once), steps, graphs)
    if failures or not works:
        for part in parts(module):
            part._compiled_call_impl = None  # noqa: SLF001 - what Module.compile sets
    return works and not failures, failed or reason


def _least_seconds(session: Session) -> float | None:
    """Return what a run takes at the chip's peak; None where that is not known."""
    peak = session.chip.flops_per_second.get(session.settings.execution.precision)
    if peak is None:
        return None
    turns = zip(session.turns.weights, session.objectives, strict=True)
    tokens = sum(
        weight * each.batch.rows * each.task.slots_per_row() * each.ladder[-1]
        for weight, each in turns
    ) / sum(session.turns.weights)
    flops = tokens * session.flops_per_token * session.total_steps
    return flops / (peak * session.world.size)


def _step_seconds(session: Session) -> float:
    """Return the seconds of this process's microbatches of a step, of the first task's longest."""
    objective = session.objectives[0]
    size = (1, objective.batch.microbatch)
    one = torch.ones((), device=session.device)
    taken = []
    for _ in range(TIMED + 1):  # the first one makes graphs and room
        batches = empty(session, objective, objective.feed, objective.ladder[-1], size)
        began = time.perf_counter()
        objective.gradients.of(batches, one)
        session.prepared.clear_gradients()
        session.accelerator.synchronize()
        taken.append(time.perf_counter() - began)
    own = -(-objective.batch.microbatches // session.world.size)
    return own * statistics.median(taken[1:])


def _together(session: Session, *own: float) -> list[float]:
    """Return the means over all processes, equal on each."""
    found = summed(torch.tensor(own).to(session.device))
    values: list[float] = (found / session.world.size).tolist()
    return values
