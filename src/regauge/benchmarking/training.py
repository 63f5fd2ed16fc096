"""How fast a run trains on 1, 2, 4 ... processes: short runs in turns, and what their ledgers say.

The machine changes from minute to minute: every number of processes has a turn before any of them
has the next. Nothing is measured here that a run does not write down itself.
"""

from __future__ import annotations

import datetime as dt
import math
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import accelerators, jsonl, processes
from regauge.config import FORMAT, build, dump, merge
from regauge.errors import SettingsError
from regauge.planning.catalog import rate
from regauge.processes import World
from regauge.supervision.nodes.topology import several
from regauge.training.defaults import local_processes
from regauge.training.settings import Training
from regauge.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.accelerators import Accelerator
    from regauge.benchmarking.settings import Benchmark, Benchmarking

LINES = 5
"""Of metrics in the timed steps of a turn: each is one measurement."""
NEVER = 10**9
EFFICIENCY = "sequences/s a process, by those of the smallest number of processes"
BATCH = {
    "weak": "the batch and the learning rate grow with the processes",
    "strong": "the batch stays, and the processes share it",
}
CHIP = ("chip", "peak_flops_per_second", "peak_source", "mfu_formula")
"""What a ledger says of the chip."""
SEQUENCES = "rows of a step x steps / (step + data wait seconds)"


@dataclass(frozen=True)
class Turn:
    """The timed steps of one short run."""

    tokens_per_second: tuple[float, ...]
    """Of each line of metrics after the warm-up; real tokens."""
    seconds_per_step: tuple[float, ...]
    mfu: tuple[float, ...]
    """Empty where the chip's peak is unknown."""
    chip: dict[str, Any]
    """Its name, its peak with where that comes from, and the formula of MFU."""


def sizes(settings: Benchmarking) -> tuple[int, ...]:
    """Return the numbers of processes on a machine that are measured, in their order."""
    if settings.benchmark.processes:
        return tuple(sorted(set(settings.benchmark.processes)))
    accelerator = device(settings)
    most = local_processes("auto", accelerator)
    if accelerator.shared:
        most = processes.share_of_cores(World())
    powers = (2**power for power in range(most.bit_length()))
    return tuple(sorted({*(size for size in powers if size <= most), most}))


def device(settings: Benchmarking) -> Accelerator:
    """Return what is measured: the accelerator of the settings, or the fittest of this machine."""
    return settings.accelerator or accelerators.choose()[0]


def turn_of(settings: Benchmarking, size: int, number: int) -> Training:
    """Return the settings of a short run on `size` processes of each machine."""
    asked, own = settings.benchmark, dump(settings)
    del own["benchmark"]
    every = _every(asked)
    world = size * machines(settings)
    folder = Path(settings.output.folder) / f"{world}-processes-{number}"
    changes: dict[str, Any] = {
        "output": {
            "folder": str(folder),
            "trackers": ({"kind": "jsonl"},),
            "every_steps": every,
            "checkpoint": {"every_steps": NEVER, "root": None, "best": None},
        },
        "execution": {"processes": size, **_fixed(settings)},
        "evaluation": {"every_steps": 0, "rows": settings.batch.rows, "samples": {"prompts": 0}},
        "profile": False,
    }
    own["stop"] = {"steps": _warm(asked) + _timed(asked)}
    tables = merge(own, changes)
    return build(Training, _scaled(tables, world) if asked.scaling == "weak" else tables)


def _fixed(settings: Benchmarking) -> dict[str, Any]:
    """Return what every number of processes has alike: threads, and that blocks are compiled.

    A run of so few steps would not be compiled, and it stands for one of many.
    """
    execution = settings.execution
    found: dict[str, Any] = {}
    accelerator = device(settings)
    if execution.compile == "auto":
        found["compile"] = "no" if accelerator.obstacle_to_compiling() else "blocks"
    if execution.threads is None and accelerator.shared:
        found["threads"] = processes.share_of_cores(World(local_size=max(sizes(settings))))
    return found


def _scaled(tables: dict[str, Any], world: int) -> dict[str, Any]:
    """Return the tables of a run whose batch and learning rate are `world` times as large."""
    optimizer = tables["optimizer"]
    larger: dict[str, Any] = {
        "batch": {"rows": tables["batch"]["rows"] * world},
        "optimizer": {"learning_rate": optimizer["learning_rate"] * world},
    }
    task = tables["task"]
    if isinstance(task, list | tuple):
        larger["task"] = [
            merge(each, {"batch": {"rows": each["batch"]["rows"] * world}})
            if (each.get("batch") or {}).get("rows")
            else each
            for each in task
        ]
    return merge(tables, larger)


def _every(asked: Benchmark) -> int:
    return max(1, asked.steps // LINES)


def _warm(asked: Benchmark) -> int:
    """Return the steps of the warm-up, up to a line of metrics."""
    every = _every(asked)
    return math.ceil(asked.warmup_steps / every) * every


def _timed(asked: Benchmark) -> int:
    return asked.steps // _every(asked) * _every(asked)


def machines(settings: Benchmarking) -> int:
    """Return how many machines the job has; raises SettingsError where that may change."""
    found = several(settings.execution.nodes, Path(settings.output.folder))
    if found is None:
        return 1
    if found.fewest != found.most:
        raise SettingsError(
            f"execution.nodes.count = '{found.fewest}:{found.most}' is no number to measure",
            "set it to one number of nodes, and start a job for each",
        )
    return found.fewest


def read(folder: Path, asked: Benchmark) -> Turn:
    """Return what the timed steps of a short run wrote down."""
    told = jsonl.whole(folder / "ledger.jsonl")
    metrics = [line for line in jsonl.whole(folder / "metrics.jsonl") if "train/loss" in line]
    shares = [line["train/mfu"] for line in metrics if line["step"] > _warm(asked)]
    found = [line for line in told if line["step"] >= _warm(asked)]
    tokens, seconds = [], []
    for before, after in pairwise(found):
        if after["step"] == before["step"]:
            continue
        taken = _training(after) - _training(before)
        tokens.append((after["tokens"] - before["tokens"]) / taken)
        seconds.append(taken / (after["step"] - before["step"]))
    chip = {name: told[-1][name] for name in CHIP}
    return Turn(tuple(tokens), tuple(seconds), tuple(shares), chip)


def _training(line: dict[str, Any]) -> float:
    return float(line["seconds"]["step"] + line["seconds"]["data_wait"])


def row(settings: Training, turns: Sequence[Turn], nodes: int) -> dict[str, Any]:
    """Return the figures of one number of processes: medians over all lines of all its turns."""
    each = local_processes(settings.execution.processes, settings.accelerator)
    world = each * nodes
    tokens = [rate for turn in turns for rate in turn.tokens_per_second]
    shares = [share for turn in turns for share in turn.mfu]
    seconds = statistics.median(value for turn in turns for value in turn.seconds_per_step)
    found = rate(settings.execution.price)
    real = statistics.median(tokens)
    usd = found.usd_per_hour * nodes / SECONDS_PER_HOUR / real * 1e6 if found else None
    return {
        "name": f"{nodes} x {each}" if nodes > 1 else str(world),
        "processes": world,
        "rows_a_process": settings.batch.rows / world,
        "global_batch": settings.batch.rows,
        "learning_rate": settings.optimizer.learning_rate,
        "sequences_per_second": settings.batch.rows / seconds,
        "tokens_per_second": real,
        "spread": [min(tokens), max(tokens)],
        "seconds_per_step": seconds,
        "mfu": statistics.median(shares) if shares else None,
        "usd_per_million_tokens": usd,
        **turns[-1].chip,
    }


def document(
    settings: Benchmarking, rows: list[dict[str, Any]], earlier: dict[str, Any]
) -> dict[str, Any]:
    """Return what is written: the rows with their efficiency, and what they were measured on.

    Rows of other numbers of processes that an earlier job found in this folder are kept, where it
    had the same settings: jobs on more and more machines make one table.
    """
    now, before = _alike(settings), earlier.get("settings")
    sizes = {each["processes"] for each in rows}
    kept = [each for each in earlier.get("rows", ()) if each["processes"] not in sizes]
    rows = sorted([*rows, *(kept if now == before else ())], key=lambda each: each["processes"])
    first = rows[0]
    alone = first["sequences_per_second"] / first["processes"]
    peak = max((each["peak_flops_per_second"] or 0.0 for each in rows), default=0.0)
    for each in rows:
        if each["mfu"] is not None:  # one peak for all: each run has timed its own
            each["mfu"] *= each["peak_flops_per_second"] / peak
            each["peak_flops_per_second"] = peak
        each["efficiency"] = each["sequences_per_second"] / each["processes"] / alone
    asked = settings.benchmark
    return {
        "format": FORMAT,
        "scaling": asked.scaling,
        "meaning": BATCH[asked.scaling],
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "steps": _timed(asked),
        "turns": asked.turns,
        "formulas": {"sequences_per_second": SEQUENCES, "efficiency": EFFICIENCY},
        "rows": rows,
        "settings": now,
    }


def _alike(settings: Benchmarking) -> dict[str, Any]:
    """Return the settings that rows of one table share."""
    own = dump(settings)
    own["benchmark"].pop("processes")
    own["execution"].pop("nodes")
    return own
