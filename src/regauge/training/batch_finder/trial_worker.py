"""One process of a trial, started by `worker.run_worker`.

What it has measured stays where it dies.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regauge import choices, config, processes
from regauge.errors import explain
from regauge.supervision.failures import kind_of
from regauge.training.compile.warmup import build_empty_batches
from regauge.training.optimizer_step import optimizer_step
from regauge.training.run_setup import set_up
from regauge.training.settings import Training
from regauge.worker import receive_job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.accelerators import Batch
    from regauge.training.context import RunContext
    from regauge.training.state import TrainState
    from regauge.worker import WorkerJob

GAIN = 1.05
"""Times the rows a second of smaller sizes; a size that has less is the last."""
TIMED = 2
LONGEST_SECONDS = 60.0
"""After so long no further size is begun."""


def main() -> None:
    """Try the sizes of the request, the smallest first."""
    job = receive_job()
    _die_first()
    tables = job.request
    choices.allow(tables)  # what the run's own file names; the run has written this one
    sizes = tables.pop("sizes")
    world = processes.world()
    try:
        settings = config.build(Training, tables)
        context, state = set_up(settings, world)
        climb(context, state, sizes, job)
    except Exception as error:
        job.write_line({"error": explain(error)[0], "memory": kind_of(error) == "memory"})
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def climb(context: RunContext, state: TrainState, sizes: Sequence[int], job: WorkerJob) -> None:
    """Measure rising sizes until more rows at a time no longer give more rows a second."""
    state.lr_schedule.seek(0)
    context.metrics.begin()
    state.guard.begin()
    best, began = 0.0, time.monotonic()
    for rows in sizes:
        if context.world.first:
            job.write_line({"begins": rows})
        seconds, peak, spent = _slowest(context, state, rows, began)
        speed = context.world.size * rows / seconds
        if context.world.first:
            tried = {"rows": rows, "bytes": int(peak), "rows_per_second": speed}
            job.write_line({"tried": tried})
        if speed < GAIN * best or spent > LONGEST_SECONDS:
            return
        best = max(best, speed)


def _slowest(
    context: RunContext, state: TrainState, rows: int, began: float
) -> tuple[float, float, float]:
    """Return seconds of a microbatch, the most bytes, and seconds since the beginning.

    All processes return the same: what the worst of them has.
    """
    seconds = _timed(context, state, rows)
    peak = context.accelerator.peak_memory_bytes() or 0
    found = torch.tensor([seconds, peak, time.monotonic() - began], dtype=torch.float64)
    if context.world.size > 1:
        values: list[Any] = [None] * context.world.size
        dist.all_gather_object(values, found.tolist())
        found = torch.tensor(values, dtype=torch.float64).amax(0)
    slowest, most, spent = found.tolist()
    return slowest, most, spent


def _timed(context: RunContext, state: TrainState, rows: int) -> float:
    """Do a whole update, then return the shortest of some passes over one microbatch.

    A coupled loss has the outputs of all microbatches at once, any other one those of one: a second
    shows what adding to gradients takes.
    """
    own = -(-context.settings.batch.rows // (rows * context.world.size))
    count = own if context.task_at(state.step).task.coupled else min(2, own)
    optimizer_step(context, state, _longest(context, state, rows, count))
    one = torch.ones((), device=context.device)
    best = float("inf")
    for _ in range(TIMED):
        batches = _longest(context, state, rows, 1)
        context.accelerator.synchronize()
        began = time.monotonic()
        context.task_at(state.step).gradients.accumulate_gradients(batches, one)
        context.accelerator.synchronize()
        best = min(best, time.monotonic() - began)
        state.model.clear_gradients()
    return best


def _longest(context: RunContext, state: TrainState, rows: int, count: int) -> list[Batch]:
    """Return microbatches of the longest declared shape, with no row in them, on the device."""
    own = context.task_at(state.step)
    return build_empty_batches(context, own, own.feed, own.ladder[-1], (count, rows))


def _die_first() -> None:
    """Be the process that the kernel takes where the machine's memory ends."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main()
