"""Training benchmark on 1, 2, 4, ... processes: alternating short runs.

All figures come from the runs' ledgers and metrics.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import accelerators
from regauge.config import FORMAT, build, dump, merge
from regauge.config.output_files import LEDGER, METRICS
from regauge.evaluation.benchmark import summary
from regauge.machines.catalog import find_price
from regauge.run_folders.documents import LedgerLine, training_seconds
from regauge.supervision.nodes.topology import resolve_topology
from regauge.system import jsonl, processes
from regauge.system.errors import SettingsError
from regauge.system.processes import World
from regauge.training.defaults import count_local_processes
from regauge.training.optimizer_defaults import resolve_optimizer
from regauge.training.settings import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.accelerators import Accelerator
    from regauge.evaluation.benchmark.settings import Benchmark, TrainingBenchmarkSettings

MEASUREMENTS_PER_RUN = 5
"""Metric lines in a short run's timed steps; each is one measurement."""
NEVER_STEPS = 10**9
EFFICIENCY_FORMULA = "sequences/s per process, relative to the smallest number of processes"
SCALING_DESCRIPTIONS = {
    "weak": "the batch and the learning rate grow with the processes",
    "strong": "the batch is constant and the processes share it",
}
CHIP_KEYS = ("chip", "peak_flops_per_second", "peak_source", "mfu_formula")
"""Chip keys in a ledger line."""
SEQUENCES_FORMULA = "rows per step x steps / (step + data wait seconds)"


@dataclass(frozen=True)
class TimedSteps:
    """Measurements from one short run."""

    tokens_per_second: tuple[float, ...]
    """Real tokens per second in each metric line after the warm-up."""
    seconds_per_step: tuple[float, ...]
    mfu: tuple[float, ...]
    """MFU in each metric line after the warm-up; empty if the chip's peak is unknown."""
    chip: dict[str, Any]
    """Chip name, peak with source, and MFU formula."""


def list_process_counts(settings: TrainingBenchmarkSettings) -> tuple[int, ...]:
    """Return the process counts per machine to measure, ascending."""
    if settings.benchmark.processes:
        return tuple(sorted(set(settings.benchmark.processes)))
    accelerator = choose_accelerator(settings)
    max_processes = count_local_processes("auto", accelerator)
    if accelerator.is_shareable:
        max_processes = processes.cores_per_process(World())
    powers = (2**power for power in range(max_processes.bit_length()))
    counts = {power for power in powers if power <= max_processes}
    return tuple(sorted({*counts, max_processes}))


def choose_accelerator(settings: TrainingBenchmarkSettings) -> Accelerator:
    """Return the configured accelerator, or this machine's best one."""
    return settings.accelerator or accelerators.choose()[0]


def build_short_run(
    settings: TrainingBenchmarkSettings, local_size: int, number: int
) -> TrainSettings:
    """Return settings for a short run on `local_size` processes per machine."""
    settings, _ = resolve_optimizer(settings)
    benchmark, tables = settings.benchmark, dump(settings)
    del tables["benchmark"]
    world_size = local_size * count_nodes(settings)
    folder = Path(settings.output.folder) / f"{world_size}-processes-{number}"
    changes: dict[str, Any] = {
        "output": {
            "folder": str(folder),
            "trackers": ({"kind": "jsonl"},),
            "log_every_steps": _log_interval(benchmark),
            "checkpoint": {"every_steps": NEVER_STEPS, "remote": None, "best_metric": "off"},
            "final_model": "last",
        },
        "execution": {"processes": local_size, **_shared_execution(settings)},
        "evaluation": {"every_steps": 0, "rows": settings.batch.rows, "samples": {"prompts": 0}},
        "profile": False,
    }
    tables["stop"] = {"steps": _count_warmup_steps(benchmark) + _count_timed_steps(benchmark)}
    tables = merge(tables, changes)
    if benchmark.scaling == "weak":
        tables = _scale_batch(tables, world_size)
    return build(TrainSettings, tables)


def _shared_execution(settings: TrainingBenchmarkSettings) -> dict[str, Any]:
    """Return the execution settings shared by all process counts: threads and compilation.

    `auto` would not compile such a short run, but the short run represents a long one.
    """
    execution = settings.execution
    shared: dict[str, Any] = {}
    accelerator = choose_accelerator(settings)
    if execution.compile == "auto":
        shared["compile"] = "off" if accelerator.compile_obstacle() else "blocks"
    if execution.threads is None and accelerator.is_shareable:
        largest = World(local_size=max(list_process_counts(settings)))
        shared["threads"] = processes.cores_per_process(largest)
    return shared


def _scale_batch(tables: dict[str, Any], world_size: int) -> dict[str, Any]:
    optimizer = tables["optimizer"]
    larger: dict[str, Any] = {
        "batch": {"rows": tables["batch"]["rows"] * world_size},
        "optimizer": {"learning_rate": optimizer["learning_rate"] * world_size},
    }
    tasks = tables["task"]
    if isinstance(tasks, list | tuple):
        larger["task"] = [
            merge(task, {"batch": {"rows": task["batch"]["rows"] * world_size}})
            if (task.get("batch") or {}).get("rows")
            else task
            for task in tasks
        ]
    return merge(tables, larger)


def _log_interval(benchmark: Benchmark) -> int:
    return max(1, benchmark.steps // MEASUREMENTS_PER_RUN)


def _count_warmup_steps(benchmark: Benchmark) -> int:
    """Return the warm-up steps, rounded up to the next metric line."""
    interval = _log_interval(benchmark)
    return math.ceil(benchmark.warmup_steps / interval) * interval


def _count_timed_steps(benchmark: Benchmark) -> int:
    interval = _log_interval(benchmark)
    return benchmark.steps // interval * interval


def count_nodes(settings: TrainingBenchmarkSettings) -> int:
    """Return the job's node count; raises SettingsError if it is a range."""
    topology = resolve_topology(settings.execution.nodes, Path(settings.output.folder))
    if topology is None:
        return 1
    if topology.min_nodes != topology.max_nodes:
        node_range = f"{topology.min_nodes}:{topology.max_nodes}"
        raise SettingsError(
            f"execution.nodes.count = '{node_range}' is a range; a benchmark needs one number",
            "set one number of nodes and start one job for each number",
        )
    return topology.min_nodes


def read_timed_steps(folder: Path, benchmark: Benchmark) -> TimedSteps:
    """Read a short run's measurements in the timed steps."""
    warmup_steps = _count_warmup_steps(benchmark)
    ledger = jsonl.read_lines(folder / LEDGER, LedgerLine)
    lines = jsonl.read_lines(folder / METRICS, jsonl.StepLine)
    metrics = [line for line in lines if "train/loss" in line]
    mfu = [line["train/mfu"] for line in metrics if line["step"] > warmup_steps]
    timed = [line for line in ledger if line["step"] >= warmup_steps]
    tokens_per_second, seconds_per_step = [], []
    for before, after in pairwise(timed):
        if after["step"] == before["step"]:
            continue
        seconds = training_seconds(after) - training_seconds(before)
        tokens_per_second.append((after["tokens"] - before["tokens"]) / seconds)
        seconds_per_step.append(seconds / (after["step"] - before["step"]))
    chip = {key: ledger[-1][key] for key in CHIP_KEYS}
    return TimedSteps(tuple(tokens_per_second), tuple(seconds_per_step), tuple(mfu), chip)


def build_row(
    settings: TrainSettings, repeats: Sequence[TimedSteps], num_nodes: int
) -> dict[str, Any]:
    """Return the figures for one process count: medians over all lines in all repeats."""
    local_size = count_local_processes(settings.execution.processes, settings.accelerator)
    world_size = local_size * num_nodes
    speeds = [speed for repeat in repeats for speed in repeat.tokens_per_second]
    mfu = [value for repeat in repeats for value in repeat.mfu]
    seconds = statistics.median(value for repeat in repeats for value in repeat.seconds_per_step)
    speed = statistics.median(speeds)
    price = find_price(settings.execution.price)
    usd_per_hour = price.usd_per_hour * num_nodes if price else None
    return {
        "name": f"{num_nodes} x {local_size}" if num_nodes > 1 else str(world_size),
        "processes": world_size,
        "rows_per_process": settings.batch.rows / world_size,
        "global_batch_size": settings.batch.rows,
        "learning_rate": settings.optimizer.learning_rate,
        "sequences_per_second": settings.batch.rows / seconds,
        "tokens_per_second": speed,
        "tokens_per_second_range": [min(speeds), max(speeds)],
        "seconds_per_step": seconds,
        "mfu": statistics.median(mfu) if mfu else None,
        "usd_per_million_tokens": summary.compute_usd_per_million(usd_per_hour, speed),
        **repeats[-1].chip,
    }


def build_document(
    settings: TrainingBenchmarkSettings, rows: list[dict[str, Any]], earlier: dict[str, Any]
) -> dict[str, Any]:
    """Return the benchmark document: rows with their efficiency, formulas and settings.

    Rows from an earlier job in this folder are kept if its settings were equal and its process
    count differs, so that jobs on different machine counts share one table.
    """
    shared = _shared_settings(settings)
    if earlier.get("shared_settings") == shared:
        counts = {row["processes"] for row in rows}
        rows = [*rows, *(row for row in earlier.get("rows", ()) if row["processes"] not in counts)]
    rows = sorted(rows, key=lambda row: row["processes"])
    per_process = rows[0]["sequences_per_second"] / rows[0]["processes"]
    peak = max((row["peak_flops_per_second"] or 0.0 for row in rows), default=0.0)
    for row in rows:
        if row["mfu"] is not None:  # one peak for all rows: each run has measured it again
            row["mfu"] *= row["peak_flops_per_second"] / peak
            row["peak_flops_per_second"] = peak
        row["efficiency"] = row["sequences_per_second"] / row["processes"] / per_process
    benchmark = settings.benchmark
    return {
        "format": FORMAT,
        "kind": "training",
        "scaling": benchmark.scaling,
        "description": SCALING_DESCRIPTIONS[benchmark.scaling],
        "date": summary.today().isoformat(),
        "steps": _count_timed_steps(benchmark),
        "repeats": benchmark.repeats,
        "formulas": {"sequences_per_second": SEQUENCES_FORMULA, "efficiency": EFFICIENCY_FORMULA},
        "rows": rows,
        "shared_settings": shared,
    }


def _shared_settings(settings: TrainingBenchmarkSettings) -> dict[str, Any]:
    tables = dump(settings)
    tables["benchmark"].pop("processes")
    tables["execution"].pop("nodes")
    return tables
