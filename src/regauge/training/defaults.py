"""Chooses the execution settings that a run file leaves open, once, and logs why.

The choices are accelerator, strategy, precision, threads and, if it is certain, compilation. They
become part of the settings in `run.json`, so a resumed run keeps them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regauge import accelerators
from regauge.config import FORMAT, dump
from regauge.supervision.nodes.topology import resolve_topology
from regauge.system import choices, processes
from regauge.system.errors import DataError, SettingsError, TransientError
from regauge.system.files import write_json
from regauge.system.json_files import find_json
from regauge.system.log import logger
from regauge.system.wording import format_count
from regauge.training.optimizer_defaults import resolve_optimizer
from regauge.training.run_record import PROBE

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.accelerators import Accelerator, Precision
    from regauge.supervision.channel import WorkerReporter
    from regauge.system.processes import World
    from regauge.tasks import Direction
    from regauge.training.settings import Batch, Execution, TrainSettings
    from regauge.training.strategies import Strategy

CAPTURABLE_OPTIMIZERS = ("adamw", "lamb")
"""Optimizers that accept learning rate and step count as device tensors."""
DECISION_FILE, PRECISION = "precision.json", "precision"


def default_strategy(num_processes: int) -> Strategy:
    """Return the default strategy: `single` or `ddp`."""
    strategy: Strategy = choices.load("strategies", "single" if num_processes == 1 else "ddp")()
    return strategy


def count_local_processes(requested: int | Literal["auto"], accelerator: Accelerator | None) -> int:
    """Return how many processes this machine starts; `auto` is one per device."""
    if requested != "auto":
        return requested
    return (accelerator or accelerators.choose()[0]).num_devices()


def resolve_defaults(
    settings: TrainSettings, world: World, reporter: WorkerReporter | None = None
) -> TrainSettings:
    """Resolve the optimizer, accelerator, strategy, precision and number of threads.

    With a `reporter`, all processes call this together, and process 0 chooses an open precision.
    Raises SettingsError for a combination that cannot run, before anything is allocated.
    """
    settings, _ = resolve_optimizer(settings)
    accelerator, execution = _resolve_accelerator(settings.accelerator, world), settings.execution
    precision = resolve_precision(settings, accelerator, world, reporter)
    execution = _resolve_execution(execution, accelerator, world, precision)
    strategy = settings.strategy or default_strategy(world.size)
    if accelerator.is_lazy:
        _check_lazy(settings, accelerator)
    _check_strategy(strategy, world, settings.optimizer.kind, lazy=accelerator.is_lazy)
    check_world_size(settings, world)
    resolved = {"accelerator": accelerator, "strategy": strategy, "execution": execution}
    if settings.model.attention == "auto":
        attention = {"attention": accelerator.attention}
        resolved["model"] = settings.model.model_copy(update=attention)
    return settings.model_copy(update=resolved)


def find_accelerator(settings: TrainSettings) -> Accelerator:
    return settings.accelerator or accelerators.choose()[0]


def check_device(settings: TrainSettings) -> None:
    """Raise SettingsError if this machine cannot run the accelerator, precision or strategy."""
    accelerator = find_accelerator(settings)
    accelerators.check_available(accelerator)
    check_precision(accelerator, settings.execution.precision)
    if accelerator.is_lazy:
        _check_lazy(settings, accelerator)
    world = count_world(settings, accelerator)
    strategy = settings.strategy or default_strategy(world.size)
    _check_strategy(strategy, world, settings.optimizer.kind, lazy=accelerator.is_lazy)


def count_world(settings: TrainSettings, accelerator: Accelerator) -> World:
    """Return the world of a run with all its nodes; the rank is 0."""
    size = count_local_processes(settings.execution.processes, accelerator)
    topology = resolve_topology(settings.execution.nodes, Path(settings.output.folder))
    return processes.World(size=size * (topology.max_nodes if topology else 1), local_size=size)


def _check_lazy(settings: TrainSettings, accelerator: Accelerator) -> None:
    optimizer = settings.optimizer.kind
    if optimizer not in CAPTURABLE_OPTIMIZERS:
        raise SettingsError(
            f"torch's {optimizer} needs the learning rate as a number;"
            f" '{accelerator.kind}' would compile a new graph in each step",
            f"set optimizer.kind to one of: {', '.join(CAPTURABLE_OPTIMIZERS)}",
        )
    if settings.execution.activation_checkpointing != "none":
        raise SettingsError(
            f"the compiler of '{accelerator.kind}' would undo activation checkpointing",
            'set execution.activation_checkpointing = "none", and a smaller batch.microbatch_rows',
        )


def _check_strategy(strategy: Strategy, world: World, optimizer: str, *, lazy: bool) -> None:
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


def check_world_size(settings: TrainSettings, world: World) -> None:
    """Raise SettingsError if there are more processes than microbatches; log uneven shares."""
    for batch in {config.batch for config in settings.task_configs}:
        _check_batch(batch, world)


def _check_batch(batch: Batch, world: World) -> None:
    is_open = batch.microbatch_rows == "auto"
    batch = batch.model_copy(update={"microbatch_rows": 1}) if is_open else batch
    microbatches = batch.microbatches
    if world.size > microbatches:
        smaller = [
            size
            for size in range(1, batch.microbatch + 1)
            if batch.rows % size == 0 and batch.rows // size >= world.size
        ]
        remedy = f"use at most {format_count(microbatches, 'process')}"
        if smaller:
            remedy += f", or batch.microbatch_rows = {smaller[-1]}"
        problem = (
            f"{world.size} processes, but only {format_count(microbatches, 'microbatch')} per step"
        )
        raise SettingsError(problem, remedy)
    if microbatches % world.size and world.is_main_process and not is_open:
        max_share = -(-microbatches // world.size)
        idle = 1 - microbatches / (max_share * world.size)
        logger.info(
            "%d microbatches on %d processes: %d or %d per process, %.0f %% of the time is idle",
            microbatches,
            world.size,
            max_share,
            microbatches // world.size,
            100 * idle,
        )


def resolve_execution(
    requested: Accelerator | None, execution: Execution, world: World
) -> tuple[Accelerator, Execution]:
    """Resolve accelerator and execution settings for an evaluation or a prediction.

    Raises SettingsError for fp8, which only training supports.
    """
    if execution.precision == "fp8":
        problem = "execution.precision = 'fp8' is only for training"
        raise SettingsError(problem, 'set execution.precision = "bf16"')
    accelerator = _resolve_accelerator(requested, world)
    precision = check_precision(accelerator, execution.precision)
    return accelerator, _resolve_execution(execution, accelerator, world, precision)


def _resolve_accelerator(requested: Accelerator | None, world: World) -> Accelerator:
    return accelerators.resolve(requested, quiet=not world.is_main_process)


def _resolve_execution(
    execution: Execution, accelerator: Accelerator, world: World, precision: Precision
) -> Execution:
    compile_mode = execution.compile
    obstacle = accelerator.compile_obstacle() if compile_mode != "off" else None
    if obstacle:
        if compile_mode == "blocks":
            logger.warning("torch.compile off: %s", obstacle)
        compile_mode = "off"
    elif compile_mode == "auto" and execution.compile_cache is not None:
        compile_mode = "blocks"  # cached graphs are compiled once for many runs
    threads = execution.threads or processes.cores_per_process(world)
    if world.is_main_process:
        _log_precision(accelerator, precision, is_chosen=execution.precision == "auto")
    return execution.model_copy(
        update={
            "precision": precision,
            "compile": compile_mode,
            "threads": threads,
            "processes": world.size,
        }
    )


def check_precision(accelerator: Accelerator, requested: str) -> Precision:
    """Return the requested precision, or the device's preference for "auto".

    Raises SettingsError if the device does not support it.
    """
    if requested == "fp8":
        return _check_fp8(accelerator)
    if requested == "auto":
        return accelerator.precisions()[0]
    if not accelerator.supports(requested):
        usable = ", ".join(accelerator.precisions())
        problem = f"accelerator '{accelerator.kind}' does not train in {requested} here"
        raise SettingsError(problem, f"set execution.precision to one of: {usable}")
    precision: Precision = requested  # type: ignore[assignment]  # the device supports it
    return precision


def _check_fp8(accelerator: Accelerator) -> Precision:
    remedy = 'set execution.precision = "bf16"'
    if obstacle := accelerator.fp8_obstacle():
        problem = f"accelerator '{accelerator.kind}' does not train in fp8 here: {obstacle}"
        raise SettingsError(problem, remedy)
    if importlib.util.find_spec("torchao") is None:
        problem = "execution.precision = 'fp8' needs torchao, which is not installed"
        raise SettingsError(problem, f"pip install 'regauge[fp8]', or {remedy}")
    return "fp8"


def resolve_precision(
    settings: TrainSettings,
    accelerator: Accelerator,
    world: World,
    reporter: WorkerReporter | None,
) -> Precision:
    """Resolve the precision; with a reporter, all processes get process 0's choice.

    Raises SettingsError for a precision that the device does not support.
    """
    execution = settings.execution
    if execution.precision != "auto" or world.size == 1 or reporter is None:
        return check_precision(accelerator, execution.precision)
    file = Path(settings.output.folder) / PROBE / DECISION_FILE
    decision = Rank0Decision(file, digest(dump(accelerator), world.size, world.local_size))
    document = decision.broadcast(
        lambda: {PRECISION: check_precision(accelerator, "auto")},
        world,
        reporter,
        execution.timeout_seconds,
    )
    return check_precision(accelerator, document[PRECISION])


def _log_precision(accelerator: Accelerator, precision: Precision, *, is_chosen: bool) -> None:
    """Log why a precision was chosen, or warn that a requested one is emulated."""
    if is_chosen:
        logger.info("precision %s: %s", precision, describe_precision(accelerator, precision))
    elif accelerator.emulates(precision):
        logger.warning(
            "execution.precision: %s is emulated here, without a gain in speed", precision
        )


def describe_precision(accelerator: Accelerator, precision: Precision) -> str:
    speeds = accelerator.precision_speeds()
    others = {name: speed for name, speed in speeds.items() if name != "fp32"}
    if not others:
        return f"preferred by '{accelerator.kind}'"
    if precision in others:
        return f"matrix products {others[precision]:.2f} x as fast as fp32 here"
    name = max(others, key=others.__getitem__)
    return f"matrix products in {name} only {others[name]:.2f} x as fast here"


@dataclass(frozen=True)
class Rank0Decision:
    """A decision made by process 0 for all processes, and shared through a file."""

    file: Path
    key: str
    """Hash of the decision's inputs, equal on all processes."""

    def broadcast(
        self,
        decide: Callable[[], dict[str, Any]],
        world: World,
        reporter: WorkerReporter,
        timeout_seconds: float,
    ) -> dict[str, Any]:
        """Return the decision; process 0 makes it unless it is in the file already.

        Raises TransientError if no decision arrives within `timeout_seconds`.
        """
        if world.is_main_process and self.read() is None:
            self.write(decide())
        decision = reporter.wait_for(self.read, timeout_seconds)
        if decision is None:
            name = self.file.name
            problem = f"process {world.rank} waited {timeout_seconds:g} s for {name} of process 0"
            raise TransientError(problem, f"see the log of process 0, and {PROBE}/ of the run")
        return decision

    def write(self, decision: dict[str, Any]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.file, {"format": FORMAT, "key": self.key, **decision})

    def read(self) -> dict[str, Any] | None:
        try:
            document = find_json(self.file, "remove it")
        except DataError:
            return None
        return document if document and document.get("key") == self.key else None


def digest(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def find_best_direction(settings: TrainSettings, metric: str) -> Direction | None:
    """Return the direction of the best checkpoint's metric, from the settings or its task."""
    mode = settings.output.checkpoint.best_mode
    if mode != "auto":
        return mode
    for config in settings.task_configs:
        prefix = f"heldout.{config.name}" if config.name else "heldout"
        if metric.startswith((f"{prefix}/", f"{prefix}.")):
            return config.task.find_direction(metric)
    return None


def check_best_direction(settings: TrainSettings, metric: str) -> None:
    """Raise SettingsError if neither the settings nor the task declare a metric's best value."""
    if find_best_direction(settings, metric) is None:
        problem = f"output.checkpoint.best_metric = '{metric}': the task declares no best value"
        remedy = 'set output.checkpoint.best_mode to "min" or "max", or name another metric'
        raise SettingsError(problem, remedy)
