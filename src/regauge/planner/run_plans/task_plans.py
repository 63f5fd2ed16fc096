"""A run's plans, step times and memory: for its task, or for all tasks together."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from regauge.planner import step_time
from regauge.planner.calibration import load_calibration
from regauge.planner.training_plan import mix_plans, plan_memory, plan_training

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.machines.machine_rates import MachineRates
    from regauge.planner.anchors import Anchor
    from regauge.planner.memory_plan import Verdict
    from regauge.planner.run_plans.run_request import OtherTask, TrainingRequest
    from regauge.planner.training_job import TrainingJob
    from regauge.planner.training_plan import TrainingPlan

VERDICTS: tuple[Verdict, ...] = ("fits", "undecided", "does not fit")
"""Verdicts on the memory, the best first."""


def plan_tasks(
    request: TrainingRequest,
    job: TrainingJob,
    machine: MachineRates,
    count: int,
    runs: Iterable[Anchor] = (),
) -> TrainingPlan:
    """Return a run's plan on `count` machines; `job` is its first task's."""
    runs = tuple(runs)
    plans = [
        (share, plan_training(item, machine, count, runs))
        for share, item in _list_jobs(request, job, machine.devices * count)
    ]
    return mix_plans(plans) if request.others else plans[0][1]


def compute_step_seconds(
    request: TrainingRequest, job: TrainingJob, machine: MachineRates, count: int
) -> float:
    """Return the mean seconds per step by the formulas alone."""
    calibration = load_calibration()
    return math.fsum(
        share * step_time.plan_step(item, machine, count, calibration).total
        for share, item in _list_jobs(request, job, machine.devices * count)
    )


def judge_memory(
    request: TrainingRequest, job: TrainingJob, machine: MachineRates, count: int
) -> Verdict:
    """Return whether all tasks fit on the devices of `count` machines, by the formulas alone."""
    verdicts = [
        plan_memory(item, machine, count, load_calibration(), nearest=()).verdict
        for _, item in _list_jobs(request, job, machine.devices * count)
    ]
    return max(verdicts, key=VERDICTS.index)


def _list_jobs(
    request: TrainingRequest, job: TrainingJob, devices: int
) -> list[tuple[float, TrainingJob]]:
    """Return all tasks' jobs with their shares of the steps, first task first."""
    others = [(other.share, _place(other, request, job, devices)) for other in request.others]
    return [(1 - math.fsum(share for share, _ in others), job), *others]


def _place(
    task: OtherTask, request: TrainingRequest, job: TrainingJob, devices: int
) -> TrainingJob:
    """Return another task's job with the strategy of the first one's.

    If a search changed the first task's microbatch, it changes the other's as much.
    """
    variant = replace(
        task.request.job,
        strategy=job.strategy,
        recomputation=job.recomputation,
        precision=job.precision,
        stack=job.stack,
    )
    other = replace(task.request, job=variant)
    size = other.micro_batch or 1
    if request.micro_batch:
        size = max(round(size * job.micro_batch / request.micro_batch), 1)
    placed = other.place(devices, size)
    return placed or replace(other.job, micro_batch=1)
