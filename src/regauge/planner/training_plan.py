"""Plan a training job on some machines: memory, step time, throughput, cost, intervals.

`plan_training` joins this package's formulas. It does not allocate memory or import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from regauge.machines.machine_rates import find_peak
from regauge.planner import anchors, flops, intervals, memory_plan, step_time
from regauge.planner.calibration import ANY, ANY_KIND, load_calibration
from regauge.planner.training_job import Estimate
from regauge.system.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from regauge.machines.machine_rates import MachineRates
    from regauge.planner.anchors import Anchor, Neighbour
    from regauge.planner.calibration import PlannerConstants, StackConstants
    from regauge.planner.memory_plan import MemoryPlan
    from regauge.planner.step_time import StepParts
    from regauge.planner.training_job import TrainingJob

MAX_DISTANCE = 12.0
"""Distance beyond which an interval no longer widens."""
OWN_SPREAD = 0.08
"""Assumed standard deviation of a step time around a user's measured run."""
SPREAD_PER_REACH = 0.3
"""Growth of that deviation per unit distance."""
OTHER_PRECISION_SPREAD = 0.3
"""Deviation of an efficiency from that in half precision, by H100 rows in fp8 and bf16."""
FAR = 3.0
"""Distance from which a plan says that measured rows are far away."""


@dataclass(frozen=True)
class TrainingPlan:
    job: TrainingJob
    machine: MachineRates
    count: int
    memory: MemoryPlan
    step_parts: StepParts
    """Formula alone; `step_seconds` is corrected by near measured rows."""
    step_seconds: Estimate
    constants: StackConstants
    nearest: tuple[Neighbour, ...]
    """The nearest measured rows, nearest first."""
    notes: tuple[str, ...]
    """What lowers the confidence in this plan, one sentence for each fact."""
    task_plans: tuple[tuple[float, TrainingPlan], ...] = ()
    """All tasks' plans with shares of the steps; empty for a single task."""

    @property
    def devices(self) -> int:
        return self.machine.devices * self.count

    @property
    def rows_per_step(self) -> int:
        """Rows per update: the global batch, which may leave devices idle in the last pass."""
        if self.job.batch_rows is not None:
            return self.job.batch_rows
        copies = max(self.devices // self.job.parallelism.devices, 1)
        return copies * self.job.micro_batch * self.job.accumulation

    @property
    def tasks(self) -> tuple[tuple[float, TrainingPlan], ...]:
        """All tasks' plans with shares of the steps, which add up to 1."""
        return self.task_plans or ((1.0, self),)

    @property
    def largest_task(self) -> TrainingPlan:
        """Plan for the task that needs the most memory."""
        return max((plan for _, plan in self.tasks), key=lambda plan: plan.memory.total.p50)

    @property
    def padded_tokens(self) -> int:
        """Tokens per update in the first task, padding included."""
        return self.rows_per_step * self.job.length

    @property
    def tokens_per_step(self) -> float:
        """Real tokens per update, without padding: the mean over the tasks."""
        return math.fsum(
            share * plan.padded_tokens * plan.job.useful_fraction for share, plan in self.tasks
        )

    @property
    def tokens_per_second(self) -> Estimate:
        """Real tokens per second over all devices."""
        return self.step_seconds.invert(self.tokens_per_step)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization at p50, for the job's precision; None without a known peak."""
        peak = find_peak(self.machine, self.job.product_precision)
        device_seconds = self.step_seconds.p50 * self.devices
        if not peak:
            return None
        return math.fsum(
            share * flops.mfu(plan.job, plan.padded_tokens / device_seconds, peak)
            for share, plan in self.tasks
        )

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilization at p50: MFU with the recomputed products."""
        rho = flops.RECOMPUTED[self.job.recomputation]
        return self.mfu * (1 + rho * flops.FORWARD_SHARE) if self.mfu is not None else None

    def hours(self, steps: float, goodput: float = 1.0) -> Estimate:
        """Return the hours for `steps` updates at a goodput."""
        return self.step_seconds.scale(steps / goodput / SECONDS_PER_HOUR)

    def usd(self, steps: float, goodput: float = 1.0) -> Estimate | None:
        """Return the dollars for `steps` updates; None if the price is unknown."""
        price = self.machine.usd_per_hour
        return None if price is None else self.hours(steps, goodput).scale(price * self.count)


def plan_training(
    job: TrainingJob,
    machine: MachineRates,
    count: int = 1,
    runs: Iterable[Anchor] = (),
    calibration: PlannerConstants | None = None,
) -> TrainingPlan:
    """Return the plan of a job on `count` machines.

    `runs`: the user's measured runs, by `run_history.load_history`.
    """
    calibration = calibration or load_calibration()
    is_fused = job.has_fused_attention
    constants = calibration.find_stack(machine.chip, job.stack, is_fused=is_fused)
    features = anchors.describe(job, machine, count)
    runs = tuple(runs)
    nearest = anchors.find_nearest(features, (*anchors.load_published(), *runs))
    similar = anchors.find_nearest_memory(features, runs)
    parts = step_time.plan_step(job, machine, count, calibration)
    spread = _find_spread(job, constants, nearest)
    seconds = parts.total * anchors.correct(nearest)
    return TrainingPlan(
        job,
        machine,
        count,
        plan_memory(job, machine, count, calibration, similar),
        parts,
        intervals.estimate(seconds, spread),
        constants,
        nearest,
        _notes(machine, calibration, constants, nearest),
    )


def mix_plans(plans: Sequence[tuple[float, TrainingPlan]]) -> TrainingPlan:
    """Return the plan for a run whose steps are shared by several tasks.

    `plans`: the tasks' plans, with shares of the steps. The step is the mean over the tasks, and
    the memory is the neediest task's. All else comes from the first task.
    """
    _, first = plans[0]
    mixed = replace(first, task_plans=tuple(plans))
    seconds = math.fsum(share * plan.step_seconds.p50 for share, plan in plans)
    return replace(
        mixed,
        step_seconds=first.step_seconds.scale(seconds / first.step_seconds.p50),
        memory=mixed.largest_task.memory,
    )


def _find_spread(
    job: TrainingJob, constants: StackConstants, nearest: Sequence[Neighbour]
) -> float:
    """Return the standard deviation of a step time's logarithm.

    A user's nearby run replaces the stack's deviation, as it has the same software.
    """
    distance = nearest[0].distance if nearest else math.inf
    distances = [item.distance for item in nearest if item.anchor.run_id and item.anchor.log_error]
    if distances and distances[0] < anchors.REACH:
        return min(math.hypot(OWN_SPREAD, SPREAD_PER_REACH * distances[0]), constants.spread)
    is_other = job.product_precision != "half" and constants.stack in (ANY, *ANY_KIND.values())
    spread = math.hypot(constants.spread, OTHER_PRECISION_SPREAD if is_other else 0.0)
    return intervals.widen(spread, min(distance, MAX_DISTANCE))


def plan_scaling(
    job: TrainingJob, machine: MachineRates, counts: Sequence[int]
) -> list[TrainingPlan]:
    """Return a job's plans for several machine counts, with constant work per device."""
    return [plan_training(replace(job, batch_rows=None), machine, count) for count in counts]


def scaling_efficiency(plan: TrainingPlan, base: TrainingPlan) -> float:
    """Return a plan's throughput per machine as a share of the base plan's."""
    rate = plan.tokens_per_second.p50 / plan.count
    return rate / (base.tokens_per_second.p50 / base.count)


def plan_memory(
    job: TrainingJob,
    machine: MachineRates,
    count: int,
    calibration: PlannerConstants,
    nearest: Sequence[Neighbour],
) -> MemoryPlan:
    """Return one device's memory, corrected by the user's nearest runs."""
    constants = calibration.find_memory(job.stack)
    parts = memory_plan.plan_parts(job, machine.devices * count, constants)
    total = intervals.estimate(parts.total * anchors.correct_memory(nearest), constants.spread)
    return memory_plan.MemoryPlan(
        parts, total, machine.memory_bytes, memory_plan.judge(total, machine.memory_bytes)
    )


def _notes(
    machine: MachineRates,
    calibration: PlannerConstants,
    constants: StackConstants,
    nearest: Sequence[Neighbour],
) -> tuple[str, ...]:
    notes = []
    distance = nearest[0].distance if nearest else math.inf
    is_measured = any(item.anchor.run_id and item.distance < anchors.REACH for item in nearest)
    if not calibration.has_rows(machine.chip) and not is_measured:
        near = "all chips" if constants.chip == ANY else constants.source
        notes.append(f"unmeasured chip: {machine.chip} has the efficiency of {near}")
    elif constants.stack in (ANY, *ANY_KIND.values()) and not is_measured:
        notes.append(f"no measured row of this software on {machine.chip}")
    if distance > FAR:
        notes.append("no measured row is near this job: the interval is wide")
    if machine.peak_flops is None:
        notes.append(f"the peak of {machine.chip} is unpublished: no MFU")
    return tuple(notes)
