"""One process of a trial: `python -m regauge.training.batch_finder.trial_worker <folder>`.

What it has measured stays where it dies.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regauge import choices, config, jsonl, processes
from regauge.errors import explain
from regauge.supervision.failures import kind_of
from regauge.training.batch_finder.trial import FOUND, REQUEST
from regauge.training.compile.warmup import empty
from regauge.training.optimizer_step import advance
from regauge.training.session_setup import open_session
from regauge.training.settings import Training

if TYPE_CHECKING:
    from regauge.accelerators import Batch
    from regauge.training.session import Session

GAIN = 1.05
"""Times the rows a second of smaller sizes; a size that has less is the last."""
TIMED = 2
LONGEST_SECONDS = 60.0
"""After so long no further size is begun."""


def main() -> None:
    """Try the sizes of the request, the smallest first."""
    folder = Path(sys.argv[1])
    _die_first()
    tables = config.read(folder / REQUEST)
    choices.allow(tables)  # what the run's own file names; the run has written this one
    sizes = tables.pop("sizes")
    world = processes.world()
    try:
        settings = config.build(Training, tables)
        session = open_session(settings, world)
        climb(session, sizes, folder / FOUND)
    except Exception as error:
        said = {"error": explain(error)[0], "memory": kind_of(error) == "memory"}
        jsonl.append(folder / FOUND, said)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def climb(session: Session, sizes: tuple[int, ...], file: Path) -> None:
    """Measure rising sizes until more rows at a time no longer give more rows a second."""
    session.rates.begin(0)
    session.interval.begin()
    session.guard.begin()
    best, began = 0.0, time.monotonic()
    for rows in sizes:
        if session.world.first:
            jsonl.append(file, {"begins": rows})
        seconds, peak, spent = _slowest(session, rows, began)
        speed = session.world.size * rows / seconds
        found = {"rows": rows, "bytes": int(peak), "rows_per_second": speed}
        if session.world.first:
            jsonl.append(file, {"tried": found})
        if speed < GAIN * best or spent > LONGEST_SECONDS:
            return
        best = max(best, speed)


def _slowest(session: Session, rows: int, began: float) -> tuple[float, float, float]:
    """Return seconds of a microbatch, the most bytes, and seconds since the beginning.

    All processes return the same: what the worst of them has.
    """
    seconds = _timed(session, rows)
    peak = session.accelerator.peak_memory_bytes() or 0
    found = torch.tensor([seconds, peak, time.monotonic() - began], dtype=torch.float64)
    if session.world.size > 1:
        values: list[Any] = [None] * session.world.size
        dist.all_gather_object(values, found.tolist())
        found = torch.tensor(values, dtype=torch.float64).amax(0)
    slowest, most, spent = found.tolist()
    return slowest, most, spent


def _timed(session: Session, rows: int) -> float:
    """Do a whole update, then return the shortest of some passes over one microbatch.

    A coupled loss has the outputs of all microbatches at once, any other one those of one: a second
    shows what adding to gradients takes.
    """
    own = -(-session.settings.batch.rows // (rows * session.world.size))
    count = own if session.objective.task.coupled else min(2, own)
    advance(session, _longest(session, rows, count))
    one = torch.ones((), device=session.device)
    best = float("inf")
    for _ in range(TIMED):
        batches = _longest(session, rows, 1)
        session.accelerator.synchronize()
        began = time.monotonic()
        session.objective.gradients.of(batches, one)
        session.accelerator.synchronize()
        best = min(best, time.monotonic() - began)
        session.prepared.clear_gradients()
    return best


def _longest(session: Session, rows: int, count: int) -> list[Batch]:
    """Return microbatches of the longest declared shape, with no row in them, on the device."""
    own = session.objective
    return empty(session, own, own.feed, own.ladder[-1], (count, rows))


def _die_first() -> None:
    """Be the process that the kernel takes where the machine's memory ends."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main()
