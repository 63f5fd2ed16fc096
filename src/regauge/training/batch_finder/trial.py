"""Measures microbatch sizes in separate processes, which may run out of memory."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.config import dump
from regauge.supervision.settings import Nodes
from regauge.system import processes
from regauge.system.processes import RankLayout, World
from regauge.system.worker import WorkerExit, WorkerLimits, run_worker
from regauge.training.defaults import default_strategy
from regauge.training.settings import Output

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.supervision.channel import WorkerReporter
    from regauge.system.worker import Line
    from regauge.training.settings import TrainSettings

WORKER = "regauge.training.batch_finder.trial_worker"


@dataclass(frozen=True)
class SizeMeasurement:
    """Memory and throughput at one microbatch size."""

    rows: int
    peak_bytes: int
    """Peak process memory so far, maximum over all processes."""
    rows_per_second: float
    """Forward and backward throughput, over all processes."""


@dataclass(frozen=True)
class TrialResult:
    """A trial's measurements, and why it ended early."""

    measurements: list[SizeMeasurement]
    """By rising size."""
    problem: str = ""
    """Why the trial ended early, in one line."""
    is_out_of_memory: bool = False


def run_trial(
    settings: TrainSettings, sizes: list[int], world: World, folder: Path, reporter: WorkerReporter
) -> TrialResult:
    """Measure microbatches of rising sizes on this machine's devices.

    Returns the measurements before an early end.
    """
    request = {**dump(_build_settings(settings, world, folder, sizes[0])), "sizes": sizes}
    devices = tuple(reporter.spec.devices) if reporter.spec else ()
    lines: list[Line] = []
    worker_exit = run_worker(
        WORKER,
        request,
        folder,
        WorkerLimits(total=settings.execution.timeout_seconds),
        layout=RankLayout(world.local_size, processes.find_free_port(), devices=devices),
        on_line=lines.append,
        on_poll=reporter.heartbeat.beat,
    )
    measurements = [
        SizeMeasurement(**line["measurement"]) for line in lines if "measurement" in line
    ]
    if worker_exit.code == 0:
        return TrialResult(measurements)
    return TrialResult(measurements, *_find_problem(worker_exit, lines))


def _find_problem(worker_exit: WorkerExit, lines: list[Line]) -> tuple[str, bool]:
    sizes = [line["started_rows"] for line in lines if "started_rows" in line]
    at = f"at {sizes[-1]} rows" if sizes else "before its first step"
    failure = next((line for line in lines if "error" in line), None)
    if failure is not None:
        return f"{at}: {failure['error']}", failure["is_out_of_memory"]
    return f"{at}: {worker_exit.problem}", worker_exit.code == -signal.SIGKILL


def _build_settings(
    settings: TrainSettings, world: World, folder: Path, rows: int
) -> TrainSettings:
    """Return the trial's settings: eager, with random weights, without trackers.

    A trial uses one machine's processes. If they are too few for the run's strategy, the trial uses
    the default strategy.
    """
    local_world = World(size=world.local_size, local_size=world.local_size)
    strategy, optimizer = settings.strategy, settings.optimizer.kind
    if strategy is not None and strategy.obstacle(local_world, optimizer) is not None:
        strategy = default_strategy(local_world.size)
    model: dict[str, Any] = {"init_from": None}
    if settings.model.path:
        model["weights"] = "random"
    execution = {"processes": local_world.size, "compile": "off", "compile_cache": None}
    return settings.model_copy(
        update={
            "output": Output(folder=str(folder / "run"), trackers=()),
            "model": settings.model.model_copy(update=model),
            "strategy": strategy,
            "batch": settings.batch.model_copy(update={"microbatch_rows": rows}),
            "execution": settings.execution.model_copy(update={**execution, "nodes": Nodes()}),
        }
    )
