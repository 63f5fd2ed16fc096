"""Finds a run's microbatch size: predicts memory, measures candidates, decides for all ranks.

    <output>/probe/request.json    trial settings
    <output>/probe/lines.jsonl     each size when it starts, then the measurement
    <output>/probe/microbatch.json the decision, for every process

Process 0 decides before the run allocates a device. The trial runs in separate processes on the
same devices, so out-of-memory errors and kills end only the trial. The global batch, row order and
result do not depend on the decision.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.config import dump
from regauge.data import mixture
from regauge.data.dataset import MANIFEST
from regauge.models.init_weights import META
from regauge.models.tensors import precision_dtype
from regauge.supervision.nodes.topology import resolve_topology
from regauge.supervision.settings import Nodes
from regauge.system import processes
from regauge.system.errors import SettingsError
from regauge.system.log import logger
from regauge.system.processes import RankLayout, World
from regauge.system.units import GIGA
from regauge.system.worker import WorkerExit, WorkerLimits, run_worker
from regauge.training import run_record
from regauge.training.batch_finder.memory import estimate_row_bytes, list_weights
from regauge.training.batch_finder.model_size import count_processes
from regauge.training.defaults import (
    Rank0Decision,
    check_world_size,
    default_strategy,
    digest,
    resolve_defaults,
)
from regauge.training.run_record import PROBE
from regauge.training.settings import Output
from regauge.training.state_bytes import RunWeights

if TYPE_CHECKING:
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


DECISION_FILE = "microbatch.json"
MAX_MEMORY_SHARE = 0.8
"""Usable fraction of device memory, predicted or measured."""
NEAR_BEST = 0.95
"""Choose a smaller size if it reaches this fraction of the best throughput."""
SMALL_BATCH_TOKENS = 2**14
"""Up to this many tokens, a process's share of a step is one microbatch, unmeasured."""
UNMEASURED_MEMORY_SHARE = 0.4
"""Trust predictions up to this fraction of device memory without measuring."""
MAX_SIZES = 6
"""Sizes measured per trial, each at least twice the previous one."""


@dataclass(frozen=True)
class MemoryForecast:
    """Predicted memory per process, in bytes."""

    device_bytes: int
    fixed_bytes: int
    """Weights, master weights, gradients, moments, and the program itself."""
    bytes_per_row: int
    """Activations saved per row for the backward pass."""
    min_live_rows: int | None = None
    """Rows with live activations at a time, if more than the microbatch."""

    def required_bytes(self, rows: int) -> int:
        return self.fixed_bytes + self.bytes_per_row * max(rows, self.min_live_rows or 0)

    def fits(self, rows: int) -> bool:
        """Return whether the prediction is within `MAX_MEMORY_SHARE`."""
        return self.required_bytes(rows) <= MAX_MEMORY_SHARE * self.device_bytes

    def format_required(self, rows: int) -> str:
        return f"{self.required_bytes(rows) / GIGA:.2f}"

    @property
    def device_gigabytes(self) -> str:
        return f"{self.device_bytes / GIGA:.1f}"


def resolve_microbatch(
    settings: TrainSettings, world: World, reporter: WorkerReporter
) -> TrainSettings:
    """Resolve `batch.microbatch_rows`; every process calls this.

    A resumed run keeps its size if every process still gets a microbatch. Raises SettingsError if
    no size fits.
    """
    if settings.batch.microbatch_rows != "auto":
        return settings
    rows = _read_previous_size(settings, world)
    if rows is None:
        folder = Path(settings.output.folder) / PROBE
        decision = Rank0Decision(folder / DECISION_FILE, _hash_inputs(settings, world))
        # Process 0 may wait for one timeout for a trial, so the others wait for two.
        seconds = 2 * settings.execution.timeout_seconds
        rows = decision.broadcast(
            lambda: _find_size(settings, world, folder, reporter), world, reporter, seconds
        )["microbatch_rows"]
    batch = settings.batch.model_copy(update={"microbatch_rows": rows})
    settings = settings.model_copy(update={"batch": batch})
    check_world_size(settings, world)
    return settings


def usable_sizes(rows: int, processes: int) -> list[int]:
    """Return the possible microbatch sizes for a global batch of `rows` rows, ascending.

    Every process gets at least one microbatch. If any sizes give all processes equal shares, only
    those are returned.
    """
    usable = [size for size in range(1, rows + 1) if rows % size == 0 and rows // size >= processes]
    even = [size for size in usable if rows // size % processes == 0]
    return even or usable


def select_sizes(usable: list[int]) -> list[int]:
    """Return the largest size and up to five smaller ones, each at most half of the next."""
    sizes: list[int] = []
    for size in reversed(usable):
        if len(sizes) < MAX_SIZES and (not sizes or 2 * size <= sizes[0]):
            sizes.insert(0, size)
    return sizes


def choose_size(measurements: list[SizeMeasurement], device_bytes: int) -> SizeMeasurement | None:
    """Return the smallest size within 5 % of the best throughput; None if none fits.

    A size fits if its measured memory is at most 80 % of device memory.
    """
    fitting = [size for size in measurements if size.peak_bytes <= MAX_MEMORY_SHARE * device_bytes]
    best = max((size.rows_per_second for size in fitting), default=0.0)
    return next((size for size in fitting if size.rows_per_second >= NEAR_BEST * best), None)


def forecast_memory(settings: TrainSettings, world: World) -> MemoryForecast:
    """Predict memory per process.

    Raises SettingsError if the device memory is unknown.
    """
    accelerator, strategy = settings.accelerator, settings.strategy
    memory = accelerator.memory_bytes(world.local_size) if accelerator else None
    if accelerator is None or strategy is None or memory is None:
        kind = accelerator.kind if accelerator else "unknown"
        problem = f"batch.microbatch_rows = auto: the memory of '{kind}' is unknown"
        raise SettingsError(problem, "set it to a number")
    dataset = mixture.open_data(settings.data)
    (config,) = settings.task_configs
    with META:
        module = config.task.build_module(settings.model, dataset.manifest, settings.seed)
    precision = settings.execution.precision
    weights = RunWeights(list_weights(module), settings.optimizer.kind)
    is_recomputed = (
        strategy.needs_recompute or settings.execution.activation_checkpointing != "none"
    )
    local_rows = -(-settings.batch.rows // world.size)
    needs_all_outputs = config.task.needs_global_batch and not is_recomputed
    return MemoryForecast(
        memory,
        fixed_bytes=sum(weights.measure(strategy, world.size, precision))
        + (accelerator.peak_memory_bytes() or 0),
        bytes_per_row=estimate_row_bytes(settings, dataset, module, precision_dtype(precision)),
        min_live_rows=local_rows if needs_all_outputs else None,
    )


def describe_forecast(settings: TrainSettings) -> str:
    """Describe the predicted microbatch size for `--dry-run`."""
    if not (Path(settings.data.path) / MANIFEST).exists():
        return "auto"
    size = count_processes(settings)
    topology = resolve_topology(settings.execution.nodes, Path(settings.output.folder))
    local_size = size // topology.max_nodes if topology else size
    try:
        resolved = resolve_defaults(settings, World(rank=1, size=size, local_size=local_size))
        forecast = forecast_memory(resolved, World(size=size, local_size=local_size))
    except SettingsError as error:
        return f"auto: {error.problem}"
    sizes = usable_sizes(settings.batch.rows, size)
    if reason := _find_small_share(resolved, sizes[-1], forecast):
        return f"{sizes[-1]}: {reason}"
    fitting = [rows for rows in sizes if forecast.fits(rows)]
    if not fitting:
        return f"auto: no size is predicted to fit into {forecast.device_gigabytes} GB"
    usage = f"{forecast.format_required(fitting[-1])} of {forecast.device_gigabytes} GB"
    return f"auto: {fitting[-1]} rows are predicted to fit ({usage})"


def _find_size(
    settings: TrainSettings, world: World, folder: Path, reporter: WorkerReporter
) -> dict[str, Any]:
    """Predict, measure and decide; return the decision as JSON-ready fields."""
    forecast = forecast_memory(settings, world)
    sizes = usable_sizes(settings.batch.rows, world.size)
    if reason := _find_small_share(settings, sizes[-1], forecast):
        logger.info("batch.microbatch_rows = %d: %s", sizes[-1], reason)
        return {"microbatch_rows": sizes[-1], "reason": reason}
    candidates = [size for size in sizes if forecast.fits(size)] or sizes[:1]
    while candidates:
        trial = run_trial(settings, select_sizes(candidates), world, folder, reporter)
        best = choose_size(trial.measurements, forecast.device_bytes)
        if best is not None:
            return _format_decision(best, trial.measurements, forecast, trial.problem)
        if trial.problem and not trial.is_out_of_memory:
            logger.warning(
                "no microbatch size could be measured (%s): using the predicted %d rows",
                trial.problem,
                candidates[-1],
            )
            return {
                "microbatch_rows": candidates[-1],
                "reason": f"predicted, not measured: {trial.problem}",
            }
        smallest = select_sizes(candidates)[0]
        reason = trial.problem or "less than 20 % of the memory is left"
        logger.info("a microbatch of %d rows does not fit: %s", smallest, reason)
        candidates = [size for size in sizes if size < smallest]
    raise SettingsError(
        f"no microbatch fits into {forecast.device_gigabytes} GB: {reason}",
        "set execution.activation_checkpointing or strategy, or use a device with more memory",
    )


def _find_small_share(settings: TrainSettings, rows: int, forecast: MemoryForecast) -> str:
    """Return why a process's whole share is one microbatch; empty if it must be measured."""
    (config,) = settings.task_configs
    manifest = mixture.read_data_manifest(config.data)
    length = config.task.bucket_lengths(manifest)[-1]
    num_tokens = rows * config.task.sequences_per_row(manifest) * length
    is_certain = forecast.required_bytes(rows) <= UNMEASURED_MEMORY_SHARE * forecast.device_bytes
    if num_tokens > SMALL_BATCH_TOKENS or not is_certain:
        return ""
    return (
        f"a small batch, at most {num_tokens:,} tokens per process;"
        f" {forecast.format_required(rows)} of {forecast.device_gigabytes} GB predicted"
    )


def _format_decision(
    best: SizeMeasurement,
    measurements: list[SizeMeasurement],
    forecast: MemoryForecast,
    problem: str,
) -> dict[str, Any]:
    """Log the decision; return it as JSON-ready fields."""
    fastest = max(measurements, key=lambda size: size.rows_per_second)
    throughput = f"{best.rows_per_second:.3g} rows/s"
    if fastest.rows == best.rows:
        sizes = ", ".join(str(size.rows) for size in measurements)
        throughput += f", the fastest of {sizes} rows"
    else:
        throughput += f", close to {fastest.rows_per_second:.3g} rows/s with {fastest.rows} rows"
    limit = f"; more did not fit ({problem})" if problem else ""
    predicted, measured = forecast.format_required(best.rows), f"{best.peak_bytes / GIGA:.2f}"
    memory = f"{predicted} GB predicted, {measured} GB measured"
    reason = f"{throughput}{limit}; {memory} of {forecast.device_gigabytes} GB per process"
    logger.info("batch.microbatch_rows = %d: %s", best.rows, reason)
    return {"microbatch_rows": best.rows, "reason": reason}


def _read_previous_size(settings: TrainSettings, world: World) -> int | None:
    """Return the size used by earlier attempts, if it suits the number of processes."""
    saved = (run_record.read_run(Path(settings.output.folder)) or {}).get("batch", {})
    rows = saved.get("microbatch_rows")
    is_usable = isinstance(rows, int) and settings.batch.rows // rows >= world.size
    return rows if is_usable else None


def _hash_inputs(settings: TrainSettings, world: World) -> str:
    tables = dump(settings)
    names = ("task", "model", "optimizer", "batch", "data", "strategy", "accelerator")
    inputs = {name: tables.get(name) for name in names}
    execution = settings.execution
    return digest(
        inputs,
        execution.activation_checkpointing,
        execution.precision,
        world.size,
        world.local_size,
    )
