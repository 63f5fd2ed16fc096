"""What a run file leaves open is decided here, once, with the reason said.

Decisions are written into the settings that the run saves, so that a resumed run keeps them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regauge import accelerators, choices, processes
from regauge.config import FORMAT, dump
from regauge.errors import SettingsError, TransientError
from regauge.files import write_json
from regauge.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.accelerators import Accelerator, Precision
    from regauge.processes import World
    from regauge.strategies import Strategy
    from regauge.supervision.channel import WorkerReporter
    from regauge.training.settings import Batch, Execution, Training


ON_DEVICE = ("adamw", "lamb")
"""Optimizers whose rate and count can be data on the device."""


DECIDED, NAME = "precision.json", "precision"
FASTER = 1.5
"""Times the speed of the first that is offered; one that has less is not worth its memory."""
PROBE = "probe"
"""The folder of a run for such files, and for what was tried."""


def default_strategy(size: int) -> Strategy:
    """Return how a model lies on so many processes where nothing else is asked for."""
    found: Strategy = choices.load("strategies", "single" if size == 1 else "ddp")()
    return found


def local_processes(wanted: int | Literal["auto"], accelerator: Accelerator | None) -> int:
    """Return how many processes this machine starts; `auto` is one per device."""
    if wanted != "auto":
        return wanted
    return (accelerator or accelerators.choose()[0]).count()


def resolve_defaults(
    settings: Training, world: World, report: WorkerReporter | None = None
) -> Training:
    """Return settings with accelerator, strategy, precision, threads and compiling decided.

    Where all processes of a run call this, with their reports, it is measured what the device
    leaves open; else it is what the device says of itself. Raises SettingsError for a combination
    that cannot run, before anything is allocated.
    """
    accelerator, execution = _usable(settings.accelerator, world), settings.execution
    if report is not None:
        found = resolve_precision(settings, accelerator, world, report)
        execution = execution.model_copy(update={"precision": found})
    execution = _execution(execution, accelerator, world)
    strategy = settings.strategy or default_strategy(world.size)
    lazy, optimizer = accelerator.lazy, settings.optimizer.kind
    if lazy and optimizer not in ON_DEVICE:
        raise SettingsError(
            f"torch's {optimizer} takes its learning rate as a number: '{accelerator.kind}' would"
            " compile a new graph in every step",
            f"set optimizer.kind to one of: {', '.join(ON_DEVICE)}",
        )
    if lazy and execution.activation_checkpointing != "none":
        raise SettingsError(
            f"'{accelerator.kind}' would merge what is computed again with its first computation",
            'set execution.activation_checkpointing = "none", and a smaller batch.microbatch_rows',
        )
    obstacle = strategy.obstacle(world, optimizer, lazy=lazy)
    if obstacle:
        usable = [
            name
            for name in choices.names("strategies")
            if choices.load("strategies", name)().obstacle(world, optimizer, lazy=lazy) is None
        ]
        raise SettingsError(
            f"strategy '{strategy.kind}' cannot be used: {obstacle}",
            f"choose another strategy ({', '.join(usable)}) or number of processes",
        )
    check_world_size(settings, world)
    decided = {"accelerator": accelerator, "strategy": strategy, "execution": execution}
    if settings.model.attention == "auto":
        chosen = {"attention": accelerator.attention}
        decided["model"] = settings.model.model_copy(update=chosen)
    return settings.model_copy(update=decided)


def check_world_size(settings: Training, world: World) -> None:
    """Raise SettingsError when there are more processes than microbatches; say uneven shares."""
    for batch in {aim.batch for aim in settings.task_configs}:
        _check_share(batch, world)


def _check_share(batch: Batch, world: World) -> None:
    left = batch.microbatch_rows == "auto"
    batch = batch.model_copy(update={"microbatch_rows": 1}) if left else batch
    pieces = batch.microbatches
    if world.size > pieces:
        smaller = [
            size
            for size in range(1, batch.microbatch + 1)
            if batch.rows % size == 0 and batch.rows // size >= world.size
        ]
        remedy = f"use at most {pieces} processes"
        if smaller:
            remedy += f", or batch.microbatch_rows = {smaller[-1]}"
        raise SettingsError(f"{world.size} processes for {pieces} microbatches a step", remedy)
    if pieces % world.size and world.first and not left:
        most = -(-pieces // world.size)
        idle = 1 - pieces / (most * world.size)
        logger.info(
            "%d microbatches on %d processes: shares of %d and %d, %.0f %% of the time is idle",
            pieces,
            world.size,
            most,
            pieces // world.size,
            100 * idle,
        )


def resolve_execution(
    wanted: Accelerator | None, execution: Execution, world: World
) -> tuple[Accelerator, Execution]:
    """Return the device to compute on, and how, with everything that was left open decided."""
    accelerator = _usable(wanted, world)
    return accelerator, _execution(execution, accelerator, world)


def _usable(wanted: Accelerator | None, world: World) -> Accelerator:
    if wanted is None:
        wanted, reason = accelerators.choose()
        if world.first:
            logger.info("accelerator %s", reason)
    accelerators.require(wanted)
    return wanted


def _execution(execution: Execution, accelerator: Accelerator, world: World) -> Execution:
    precision = check_precision(accelerator, execution.precision)
    compiling = execution.compile
    obstacle = accelerator.obstacle_to_compiling() if compiling != "no" else None
    if obstacle:
        if compiling == "blocks":
            logger.warning("the run is not compiled: %s", obstacle)
        compiling = "no"
    elif compiling == "auto" and execution.compile_cache is not None:
        compiling = "blocks"  # what is kept of graphs is made once for many runs
    threads = execution.threads or processes.share_of_cores(world)
    if world.first and execution.precision == "auto":
        logger.info("precision %s: the first that '%s' offers", precision, accelerator.kind)
    return execution.model_copy(
        update={
            "precision": precision,
            "compile": compiling,
            "threads": threads,
            "processes": world.size,
        }
    )


def check_precision(accelerator: Accelerator, wanted: str) -> Precision:
    """Return the precision to compute in; raises SettingsError for one the device lacks."""
    usable = accelerator.precisions()
    found = next((each for each in usable if wanted in ("auto", each)), None)
    if found is None:
        problem = f"accelerator '{accelerator.kind}' does not train in {wanted} here"
        raise SettingsError(problem, f"set execution.precision to one of: {', '.join(usable)}")
    return found


def resolve_precision(
    settings: Training, accelerator: Accelerator, world: World, report: WorkerReporter
) -> Precision:
    """Return what a run computes in; every process of it calls this, and all get the same.

    Raises SettingsError for a precision that the device lacks.
    """
    execution = settings.execution
    if execution.precision != "auto":
        return check_precision(accelerator, execution.precision)
    if world.size == 1:
        return check_precision(accelerator, _fastest(accelerator)[NAME])
    file = Path(settings.output.folder) / PROBE / DECIDED
    agreement = Rank0Decision(file, digest(dump(accelerator), world.size, world.local_size))
    seconds = execution.timeout_seconds
    found = agreement.broadcast(lambda: _fastest(accelerator), world, report, seconds)
    return check_precision(accelerator, found[NAME])


def _fastest(accelerator: Accelerator) -> dict[str, Any]:
    """Return the first that is offered, or what was measured to be much faster, and log why.

    The record names the rates that were measured more than once.
    """
    precision = check_precision(accelerator, "auto")
    rates = accelerator.rates()
    if not rates:
        logger.info("precision %s: the first that '%s' offers", precision, accelerator.kind)
        return {NAME: precision}
    best = max(rates, key=lambda name: rates[name].flops_per_second)
    if rates[best].flops_per_second > FASTER * rates[precision].flops_per_second:
        precision = best
    repeats = {name: rate.measurements for name, rate in rates.items() if rate.measurements > 1}
    texts = [
        f"{name} {rate.flops_per_second / 1e9:.3g}"
        + (f" (best of {rate.measurements})" if name in repeats else "")
        for name, rate in rates.items()
    ]
    logger.info("precision %s: GFLOP/s measured here: %s", precision, ", ".join(texts))
    return {NAME: precision, **({"measurements": repeats} if repeats else {})}


@dataclass(frozen=True)
class Rank0Decision:
    """One decision; `key` is a word for what it depends on, and all processes know it alike."""

    file: Path
    key: str

    def broadcast(
        self,
        find: Callable[[], dict[str, Any]],
        world: World,
        report: WorkerReporter,
        seconds: float,
    ) -> dict[str, Any]:
        """Return what the first process finds, or has found before; the others wait for it.

        Raises TransientError where they have waited for so many seconds.
        """
        if world.first and self.read() is None:
            self.write(find())
        found = report.wait_for(self.read, seconds)
        if found is None:
            name = self.file.name
            problem = f"process {world.rank} did not learn {name} within {seconds:g} s"
            raise TransientError(problem, f"see the log of the first process, and its {PROBE}/")
        return found

    def write(self, decision: dict[str, Any]) -> None:
        """Leave a decision for all processes."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.file, {"format": FORMAT, "key": self.key, **decision})

    def read(self) -> dict[str, Any] | None:
        """Return what was decided of exactly this; None where nothing was."""
        try:
            document: dict[str, Any] = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return None
        return document if document["key"] == self.key else None


def digest(*facts: object) -> str:
    """Return a word that differs where facts differ that JSON can tell."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
