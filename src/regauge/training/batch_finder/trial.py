"""A few steps of a run in processes of their own, which may die of it."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge import jsonl, processes
from regauge.config import dump
from regauge.processes import Seats, World
from regauge.supervision.settings import Nodes
from regauge.training.defaults import usual
from regauge.training.settings import Output

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.supervision.channel import Report
    from regauge.training.settings import Training

REQUEST, FOUND = "run.json", "found.jsonl"
COMMAND = (sys.executable, "-m", "regauge.training.batch_finder.trial_worker")
LOOK_SECONDS = 0.1
ALONE = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
"""The processes of a trial meet by themselves, and not where those of the run do."""


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
    settings: Training, sizes: list[int], world: World, place: Path, report: Report
) -> Outcome:
    """Compute microbatches of rising sizes on this machine's devices, as far as it is worth it.

    What was measured before a process of the trial died is kept.
    """
    place.mkdir(parents=True, exist_ok=True)
    found = place / FOUND
    found.unlink(missing_ok=True)
    request = {**dump(_trial(settings, world, place, sizes[0])), "sizes": sizes}
    (place / REQUEST).write_text(json.dumps(request))
    devices = tuple(report.orders.devices) if report.orders else ()
    seats = Seats(world.local_size, processes.free_port(), devices=devices)
    command = [*COMMAND, str(place)]
    with processes.started(
        command, world.local_size, place, ALONE, quiet=True, seats=seats
    ) as children:
        code = _waited(children, settings.execution.timeout_seconds, report)
    told = jsonl.whole(found)
    measured = [Tried(**line["tried"]) for line in told if "tried" in line]
    if code == 0:
        return Outcome(measured)
    return Outcome(measured, *_why(code, told))


def _waited(children: list[processes.Child], seconds: float, report: Report) -> int | None:
    """Return the code of the first process that fails, 0 where none does, None where all hang."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        report.pulse.beat()
        codes = [child.poll() for child in children]
        if failed := [code for code in codes if code]:
            return failed[0]
        if all(code == 0 for code in codes):
            return 0
        time.sleep(LOOK_SECONDS)
    return None


def _why(code: int | None, told: list[dict[str, Any]]) -> tuple[str, bool]:
    """Return what ended a trial, and whether that was memory or a kill."""
    begun = [line["begins"] for line in told if "begins" in line]
    at = f"at {begun[-1]} rows" if begun else "before its first step"
    said = next((line for line in told if "error" in line), None)
    if said is not None:
        return f"{at}: {said['error']}", said["memory"]
    if code is None:
        return f"{at}: no answer in time", False
    if code < 0:
        return f"{at}: killed by {signal.Signals(-code).name}", code == -signal.SIGKILL
    return f"{at}: ended with code {code}", False


def _trial(settings: Training, world: World, place: Path, rows: int) -> Training:
    """Return the settings of a trial: eager, with weights that are drawn, and nothing kept.

    Where its processes are fewer than the run's and cannot be spread as those, it is as if they
    were all.
    """
    local = World(size=world.local_size, local_size=world.local_size)
    strategy, optimizer = settings.strategy, settings.optimizer.kind
    if strategy is not None and strategy.obstacle(local, optimizer) is not None:
        strategy = usual(local.size)
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
