"""A few steps of a run in processes of their own, which may die of it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge import processes
from regauge.config import dump
from regauge.processes import Seats, World
from regauge.supervision.settings import Nodes
from regauge.training.defaults import default_strategy
from regauge.training.settings import Output
from regauge.worker import WorkerExit, WorkerLimits, run_worker

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.supervision.channel import WorkerReporter
    from regauge.training.settings import Training
    from regauge.worker import Line

WORKER = "regauge.training.batch_finder.trial_worker"


@dataclass(frozen=True)
class Tried:
    """One size that was computed."""

    rows: int
    bytes: int
    """The most memory that a process had up to then."""
    rows_per_second: float
    """Forward and backward of one microbatch, in the slowest process."""


@dataclass(frozen=True)
class Outcome:
    """How a trial went."""

    measured: list[Tried]
    """From the smallest size on."""
    ended: str = ""
    """What ended it too early, in a line."""
    memory: bool = False
    """Whether that was memory, or a kill."""


def tried(
    settings: Training, sizes: list[int], world: World, place: Path, report: WorkerReporter
) -> Outcome:
    """Compute microbatches of rising sizes on this machine's devices, as far as it is worth it.

    What was measured before a process of the trial died is kept.
    """
    request = {**dump(_trial(settings, world, place, sizes[0])), "sizes": sizes}
    devices = tuple(report.spec.devices) if report.spec else ()
    lines: list[Line] = []
    ended = run_worker(
        WORKER,
        request,
        place,
        WorkerLimits(total=settings.execution.timeout_seconds),
        seats=Seats(world.local_size, processes.free_port(), devices=devices),
        on_line=lines.append,
        on_poll=report.heartbeat.beat,
    )
    measured = [Tried(**line["tried"]) for line in lines if "tried" in line]
    if ended.code == 0:
        return Outcome(measured)
    return Outcome(measured, *_cause(ended, lines))


def _cause(ended: WorkerExit, lines: list[Line]) -> tuple[str, bool]:
    """Return what ended a trial, and whether that was memory or a kill."""
    sizes = [line["begins"] for line in lines if "begins" in line]
    at = f"at {sizes[-1]} rows" if sizes else "before its first step"
    failure = next((line for line in lines if "error" in line), None)
    if failure is not None:
        return f"{at}: {failure['error']}", failure["memory"]
    return f"{at}: {ended.problem}", ended.code == -signal.SIGKILL


def _trial(settings: Training, world: World, place: Path, rows: int) -> Training:
    """Return the settings of a trial: eager, with weights that are drawn, and nothing kept.

    Where its processes are fewer than the run's and cannot be spread as those, it is as if they
    were all.
    """
    local = World(size=world.local_size, local_size=world.local_size)
    strategy, optimizer = settings.strategy, settings.optimizer.kind
    if strategy is not None and strategy.obstacle(local, optimizer) is not None:
        strategy = default_strategy(local.size)
    model: dict[str, Any] = {"init_from": None}
    execution = {"processes": local.size, "compile": "no", "compile_cache": None}
    return settings.model_copy(
        update={
            "output": Output(folder=str(place / "run"), trackers=()),
            "model": settings.model.model_copy(
                update=model | ({"weights": "random"} if settings.model.path else {})
            ),
            "strategy": strategy,
            "batch": settings.batch.model_copy(update={"microbatch_rows": rows}),
            "execution": settings.execution.model_copy(update={**execution, "nodes": Nodes()}),
        }
    )
