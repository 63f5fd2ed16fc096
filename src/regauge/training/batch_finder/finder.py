"""The microbatch of a run that leaves it open: predicted, tried once, and decided for all.

<output>/probe/request.json    the trial's settings
<output>/probe/lines.jsonl     each size as it is begun, and what was measured of it
<output>/probe/decided.json    what follows, for every process of the run

The first process decides, before any of the run has taken a device. The trial is made by processes
of its own on the same devices: one that runs out of memory, or is killed, ends nothing else.
Global batch, order and result are the same whatever is decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.config import dump
from regauge.data import mixture
from regauge.data.dataset import MANIFEST
from regauge.errors import SettingsError
from regauge.log import logger
from regauge.models.init_weights import META
from regauge.models.tensors import dtype_of
from regauge.processes import World
from regauge.supervision.nodes.topology import several
from regauge.training import run_record
from regauge.training.batch_finder.memory import bytes_per_row, load, processes_of
from regauge.training.batch_finder.trial import Tried, tried
from regauge.training.defaults import (
    PROBE,
    Rank0Decision,
    check_world_size,
    digest,
    resolve_defaults,
)
from regauge.units import GIGA

if TYPE_CHECKING:
    from regauge.supervision.channel import WorkerReporter
    from regauge.training.settings import Training

DECIDED = "decided.json"
ROOM = 0.8
"""Share of the memory that may be full, predicted or measured."""
NEAR = 0.95
"""Share of the most rows a second that is near enough to it."""
MOST_SIZES = 6
"""Sizes that one trial goes through, each at least twice the one before."""


@dataclass(frozen=True)
class Forecast:
    """What a process is expected to need, in bytes."""

    memory: int
    """What it can have."""
    held: int
    """Weights, masters, gradients, moments, and the program itself."""
    row: int
    """What is kept of a row for the backward pass."""
    live: int | None = None
    """Rows of which it is kept at a time, where that is not the microbatch's."""

    def of(self, rows: int) -> int:
        """Return what a process needs with microbatches of so many rows."""
        return self.held + self.row * max(rows, self.live or 0)

    def fits(self, rows: int) -> bool:
        """Return whether that leaves room."""
        return self.of(rows) <= ROOM * self.memory


def resolve_microbatch(settings: Training, world: World, report: WorkerReporter) -> Training:
    """Return decided settings whose microbatch has a size; every process of a run calls this.

    A size that the run has had is kept where it is enough for all processes. Raises SettingsError
    where none fits.
    """
    if settings.batch.microbatch_rows != "auto":
        return settings
    rows = _kept(settings, world)
    if rows is None:
        place = Path(settings.output.folder) / PROBE
        agreement = Rank0Decision(place / DECIDED, _key(settings, world))
        seconds = 2 * settings.execution.timeout_seconds  # the first may wait as long for a trial
        rows = agreement.broadcast(
            lambda: _found(settings, world, place, report), world, report, seconds
        )["rows"]
    batch = settings.batch.model_copy(update={"microbatch_rows": rows})
    settings = settings.model_copy(update={"batch": batch})
    check_world_size(settings, world)
    return settings


def usable_sizes(rows: int, processes: int) -> list[int]:
    """Return the microbatches that so many processes can use, the smallest first.

    Where some give all processes equal shares, it is only those.
    """
    usable = [size for size in range(1, rows + 1) if rows % size == 0 and rows // size >= processes]
    even = [size for size in usable if rows // size % processes == 0]
    return even or usable


def select_sizes(usable: list[int]) -> list[int]:
    """Return the largest size and some smaller ones, each at most half of the next."""
    found: list[int] = []
    for size in reversed(usable):
        if len(found) < MOST_SIZES and (not found or 2 * size <= found[0]):
            found.insert(0, size)
    return found


def choose_size(measured: list[Tried], memory: int) -> Tried | None:
    """Return the smallest size whose rows a second are within 5 % of the best, of those that fit.

    One fits where the memory that was measured is at most 80 % of what there is.
    """
    fitting = [each for each in measured if each.bytes <= ROOM * memory]
    best = max((each.rows_per_second for each in fitting), default=0.0)
    return next((each for each in fitting if each.rows_per_second >= NEAR * best), None)


def forecast_memory(settings: Training, world: World) -> Forecast:
    """Return what a process of a run will need, and what it can have.

    Raises SettingsError for a device whose memory is not known.
    """
    accelerator, strategy = settings.accelerator, settings.strategy
    memory = accelerator.memory_bytes(world.local_size) if accelerator else None
    if accelerator is None or strategy is None or memory is None:
        kind = accelerator.kind if accelerator else "unknown"
        problem = f"batch.microbatch_rows = auto: the memory of '{kind}' is not known"
        raise SettingsError(problem, "set it to a number")
    dataset = mixture.opened(settings.data)
    (aim,) = settings.task_configs
    with META:
        module = aim.task.module(settings.model, dataset.manifest, settings.seed)
    dtype = dtype_of(settings.execution.precision)
    parts = load(settings.optimizer, module, strategy, world.size, dtype)
    again = strategy.recomputes or settings.execution.activation_checkpointing != "none"
    share = -(-settings.batch.rows // world.size)
    return Forecast(
        memory,
        held=sum(parts.values()) + (accelerator.peak_memory_bytes() or 0),
        row=bytes_per_row(settings, dataset, module, dtype),
        live=share if aim.task.coupled and not again else None,
    )


def describe_forecast(settings: Training) -> str:
    """Return what a dry run says of a size that is left to the finder."""
    left = "left to the finder"
    if not (Path(settings.data.path) / MANIFEST).exists():
        return left
    size = processes_of(settings)
    nodes = several(settings.execution.nodes, Path(settings.output.folder))
    local = size // nodes.most if nodes else size
    try:
        decided = resolve_defaults(settings, World(rank=1, size=size, local_size=local))
        seen = forecast_memory(decided, World(size=size, local_size=local))
    except SettingsError as error:
        return f"{left}: {error.problem}"
    fitting = [rows for rows in usable_sizes(settings.batch.rows, size) if seen.fits(rows)]
    if not fitting:
        return f"{left}: none is predicted to fit into {seen.memory / GIGA:.1f} GB"
    need = f"{seen.of(fitting[-1]) / GIGA:.2f} of {seen.memory / GIGA:.1f} GB"
    return f"{left}: {fitting[-1]} are predicted to fit ({need})"


def _found(settings: Training, world: World, place: Path, report: WorkerReporter) -> dict[str, Any]:
    """Predict, try and decide; return what is written of it."""
    seen = forecast_memory(settings, world)
    left = usable_sizes(settings.batch.rows, world.size)
    tops = [size for size in left if seen.fits(size)] or left[:1]
    while tops:
        outcome = tried(settings, select_sizes(tops), world, place, report)
        best = choose_size(outcome.measured, seen.memory)
        if best is not None:
            return _told(best, outcome.measured, seen, outcome.ended)
        if outcome.ended and not outcome.memory:
            logger.warning(
                "no microbatch could be tried (%s): the predicted %d rows are taken",
                outcome.ended,
                tops[-1],
            )
            return {"rows": tops[-1], "reason": f"predicted, not tried: {outcome.ended}"}
        smallest = select_sizes(tops)[0]
        why = outcome.ended or "it leaves no room"
        logger.info("a microbatch of %d rows does not fit: %s", smallest, why)
        tops = [size for size in left if size < smallest]
    raise SettingsError(
        f"no microbatch fits into {seen.memory / GIGA:.1f} GB: {why}",
        "set execution.activation_checkpointing, take another strategy, or more memory",
    )


def _told(best: Tried, measured: list[Tried], seen: Forecast, ended: str) -> dict[str, Any]:
    """Say what was decided, and why; return what is written of it."""
    most = max(measured, key=lambda each: each.rows_per_second)
    speed = f"{best.rows_per_second:.3g} rows/s"
    if most.rows == best.rows:
        reason = f"{speed}, the most of {', '.join(str(each.rows) for each in measured)} rows"
    else:
        reason = f"{speed}, near the {most.rows_per_second:.3g} of {most.rows} rows"
    beyond = f"; more did not fit ({ended})" if ended else ""
    memory = f"{seen.of(best.rows) / GIGA:.2f} GB predicted, {best.bytes / GIGA:.2f} GB measured"
    reason = f"{reason}{beyond}; {memory} of the {seen.memory / GIGA:.1f} GB of each process"
    logger.info("batch.microbatch_rows = %d: %s", best.rows, reason)
    return {"rows": best.rows, "reason": reason}


def _kept(settings: Training, world: World) -> int | None:
    """Return the size that the run had before, if it has begun and the size is still of use."""
    saved = (run_record.read_run(Path(settings.output.folder)) or {}).get("batch", {})
    rows = saved.get("microbatch_rows")
    usable = isinstance(rows, int) and settings.batch.rows // rows >= world.size
    return rows if usable else None


def _key(settings: Training, world: World) -> str:
    """Return a word for everything that a decision depends on and all processes know alike."""
    tables = dump(settings)
    names = ("task", "model", "optimizer", "batch", "data", "strategy", "accelerator")
    own = {name: tables.get(name) for name in names}
    execution = settings.execution
    again, precision = execution.activation_checkpointing, execution.precision
    return digest(own, again, precision, world.size, world.local_size)
