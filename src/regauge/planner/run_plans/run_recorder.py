"""Records a finished training run for later plans: measured step time and peak memory.

The record includes the run's plan, so that later plans show how far they were off. A failure never
affects the run.
"""

from __future__ import annotations

import datetime as dt
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.config import RUN_IDENTITY, find_saved_run
from regauge.config.output_files import LEDGER, SAVED_RUN
from regauge.config.run_names import name_run
from regauge.machines.machine_rates import MachineRates, build_machine, find_machine
from regauge.planner import anchors, run_history
from regauge.planner.anchors import Anchor
from regauge.planner.inference_plan import find_measured_chip
from regauge.planner.run_plans.run_request import read_request
from regauge.planner.run_plans.task_plans import compute_step_seconds, plan_tasks
from regauge.run_folders.documents import LedgerLine, training_seconds
from regauge.system import jsonl
from regauge.system.errors import RegaugeError
from regauge.system.log import logger
from regauge.system.units import GIGA

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from regauge.planner.run_plans.run_request import TrainingRequest

REMEDY = "name another output.folder"
MIN_INTERVALS = 2
"""Fewest ledger intervals, after the first one, for a step time."""
PROCESSOR_BANDWIDTH = 20.0 * GIGA
"""Assumed bytes per second for CPU memory, shared by its processes."""
DEFAULT_MEMORY = 16.0 * GIGA
"""Assumed bytes on a device with unknown memory."""


def record_finished(folder: Path) -> Anchor | None:
    """Record an output folder's run; None if it is not recorded.

    A run that is too short for a step time is not recorded, nor is one that the planner cannot
    count. Logs a failure's reason at debug level, and never raises.
    """
    try:
        if run_history.find_history() is None:
            return None
        anchor = measure_run(folder)
        if anchor is not None:
            run_history.record_run(anchor)
    except RegaugeError as error:
        logger.debug("the run cannot correct later plans: %s", error.problem)
    except Exception as error:  # noqa: BLE001 - a finished run must not fail because of its record
        logger.debug("the run cannot correct later plans: %r", error)
    else:
        return anchor
    return None


def measure_run(folder: Path) -> Anchor | None:
    """Return a run beside its plan; None if it is too short, or lacks a ledger.

    Raises SettingsError if the planner cannot count the run, DataError for damaged files.
    """
    saved = find_saved_run(folder, REMEDY)
    lines = jsonl.read_lines(folder / LEDGER, LedgerLine)
    seconds = median_step(lines)
    if saved is None or seconds is None:
        return None
    request = read_request(saved, folder / SAVED_RUN)
    identity = str(saved.get(RUN_IDENTITY, {}).get("run_id", folder))
    earlier = [run for run in run_history.load_history() if run.run_id != identity]
    machine, count = find_used_machine(saved, lines[-1])
    machine = _keep_peak(machine, earlier, request.job.precision)
    job = request.place(machine.devices * count)
    if job is None:
        return None
    plan = plan_tasks(request, job, machine, count, earlier)
    peak = max((line.get("memory_bytes") or {}).get("peak", 0) for line in lines)
    return Anchor(
        _name_run(request, folder),
        anchors.describe(job, machine, count),
        "measured here",
        measured_seconds=seconds,
        predicted_seconds=compute_step_seconds(request, job, machine, count),
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        measured_bytes=peak or None,
        predicted_bytes=plan.memory.parts.total,
        run_id=identity,
        planned_seconds=plan.step_seconds.p50,
        planned_bytes=plan.memory.total.p50,
        machine=machine if machine.name == run_history.LOCAL else None,
    )


def _keep_peak(machine: MachineRates, earlier: Sequence[Anchor], precision: str) -> MachineRates:
    """Return a CPU with the peak measured by the first run on it.

    Each run measures the peak again, with noise, and runs' errors refer to one peak.
    """
    same = [run for run in earlier if run.machine and run.machine.chip == machine.chip]
    same = [run for run in same if run.features.precision == precision]
    if not same or not machine.is_shared:
        return machine
    known = run_history.find_local_machine(same, machine.devices, precision)
    return replace(machine, peak_flops=known.peak_flops)


def _name_run(request: TrainingRequest, folder: Path) -> str:
    shape = request.job.shape
    return f"{name_run(folder)}: {shape.family} {shape.layers} x {shape.hidden}"


def median_step(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the median seconds per step over the ledger intervals; None if too few.

    The first interval in each attempt warms up, so it does not count.
    """
    intervals, warm_attempts = [], set()
    for before, after in pairwise(lines):
        steps = after["step"] - before["step"]
        if before["attempt"] != after["attempt"] or steps <= 0:
            continue
        if before["attempt"] in warm_attempts or _is_first_attempt(before):
            intervals.append((training_seconds(after) - training_seconds(before)) / steps)
        warm_attempts.add(after["attempt"])
    return statistics.median(intervals) if len(intervals) >= MIN_INTERVALS else None


def _is_first_attempt(line: Mapping[str, Any]) -> bool:
    """Return whether a line ends a run's first interval, so that the next one is warm."""
    return bool(line["attempt"] == 1 and line["step"] > 0)


def find_used_machine(
    saved: Mapping[str, Any], line: Mapping[str, Any]
) -> tuple[MachineRates, int]:
    """Return the machine type that a run used, and the machine count.

    Without `execution.price.instance` it is the chip named in the ledger, as the machine `local`.
    Its devices are one machine's processes.
    """
    execution = saved.get("execution", {})
    devices = execution.get("processes", 1)
    devices = devices if isinstance(devices, int) else 1
    nodes = execution.get("nodes", {}).get("count")
    count = nodes if isinstance(nodes, int) else 1
    if instance := execution.get("price", {}).get("instance"):
        return replace(find_machine(instance), devices=devices), count
    accelerator = saved.get("accelerator") or {}
    if accelerator.get("kind") != "cpu" and (chip := find_measured_chip(line["chip"])):
        machine = build_machine(run_history.LOCAL, chip.name, devices, 0.0)
        return replace(machine, devices=devices), count
    return _describe_processor(line, devices), count


def _describe_processor(line: Mapping[str, Any], devices: int) -> MachineRates:
    return MachineRates(
        name=run_history.LOCAL,
        chip=line["chip"],
        devices=devices,
        peak_flops=line.get("peak_flops_per_second"),
        memory_bytes=_read_memory() / devices,
        memory_bandwidth=PROCESSOR_BANDWIDTH / devices,
        link_bandwidth=PROCESSOR_BANDWIDTH / devices,
        network_bandwidth=0.0,
        is_shared=True,
    )


def _read_memory() -> float:
    """Return this machine's memory in bytes."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        return 1024.0 * int(text.partition("MemTotal:")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return DEFAULT_MEMORY
