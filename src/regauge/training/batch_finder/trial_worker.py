"""One trial process, started by `worker.run_worker`.

Each measurement is written at once, so it survives if the process dies.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regauge import config
from regauge.supervision.failures import classify_error
from regauge.system import choices, processes
from regauge.system.errors import describe_error
from regauge.system.worker import receive_job
from regauge.training.compile.warmup import build_empty_batches
from regauge.training.optimizer import optimizer_step
from regauge.training.run_setup import set_up
from regauge.training.settings import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.accelerators import Batch
    from regauge.system.worker import WorkerJob
    from regauge.training.context import RunContext
    from regauge.training.state import TrainState

MIN_SPEEDUP = 1.05
"""The trial continues only if a size is this much faster than smaller ones."""
TIMED_PASSES = 2
MAX_SECONDS = 60.0
"""No further size is measured after this time."""


def main() -> None:
    job = receive_job()
    _prefer_oom_kill()
    tables = job.request
    choices.allow_imports(tables)  # the choices of the run file; the run wrote this request
    sizes = tables.pop("sizes")
    world = processes.detect_world()
    try:
        settings = config.build(TrainSettings, tables)
        context, state = set_up(settings, world)
        measure_sizes(context, state, sizes, job)
    except Exception as error:
        job.write_line(
            {
                "error": describe_error(error)[0],
                "is_out_of_memory": classify_error(error) == "memory",
            }
        )
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def measure_sizes(
    context: RunContext, state: TrainState, sizes: Sequence[int], job: WorkerJob
) -> None:
    state.lr_schedule.seek(0)
    context.metrics.begin()
    state.guard.begin()
    best, began = 0.0, time.monotonic()
    for rows in sizes:
        if context.world.is_main_process:
            job.write_line({"started_rows": rows})
        seconds, peak_bytes, elapsed = _measure_worst(context, state, rows, began)
        rows_per_second = context.world.size * rows / seconds
        if context.world.is_main_process:
            measurement = {
                "rows": rows,
                "peak_bytes": int(peak_bytes),
                "rows_per_second": rows_per_second,
            }
            job.write_line({"measurement": measurement})
        if rows_per_second < MIN_SPEEDUP * best or elapsed > MAX_SECONDS:
            return
        best = max(best, rows_per_second)


def _measure_worst(
    context: RunContext, state: TrainState, rows: int, began: float
) -> tuple[float, float, float]:
    """Return [seconds per microbatch, peak bytes, seconds since the trial started].

    Every process gets the maximum over all processes.
    """
    seconds = _time_microbatch(context, state, rows)
    peak = context.accelerator.peak_memory_bytes() or 0
    worst = torch.tensor([seconds, peak, time.monotonic() - began], dtype=torch.float64)
    if context.world.size > 1:
        gathered: list[Any] = [None] * context.world.size
        dist.all_gather_object(gathered, worst.tolist())
        worst = torch.tensor(gathered, dtype=torch.float64).amax(0)
    max_seconds, max_bytes, elapsed = worst.tolist()
    return max_seconds, max_bytes, elapsed


def _time_microbatch(context: RunContext, state: TrainState, rows: int) -> float:
    """Do one update, then return the shortest time of some passes over one microbatch.

    A loss over the global batch holds the outputs of all microbatches, so the update has all of
    them. Otherwise two microbatches suffice to include gradient accumulation memory.
    """
    local_count = -(-context.settings.batch.rows // (rows * context.world.size))
    needs_all = context.task_at(state.step).task.needs_global_batch
    count = local_count if needs_all else min(2, local_count)
    optimizer_step(context, state, _build_largest_batches(context, state, rows, count))
    one = torch.ones((), device=context.device)
    best = float("inf")
    for _ in range(TIMED_PASSES):
        batches = _build_largest_batches(context, state, rows, 1)
        context.accelerator.synchronize()
        began = time.monotonic()
        context.task_at(state.step).gradients.accumulate_gradients(batches, one)
        context.accelerator.synchronize()
        best = min(best, time.monotonic() - began)
        state.model.clear_gradients()
    return best


def _build_largest_batches(
    context: RunContext, state: TrainState, rows: int, count: int
) -> list[Batch]:
    """Return empty microbatches with the longest declared shape, on the device."""
    task = context.task_at(state.step)
    return build_empty_batches(context, task, task.loader, task.bucket_lengths[-1], (count, rows))


def _prefer_oom_kill() -> None:
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")


if __name__ == "__main__":
    main()
