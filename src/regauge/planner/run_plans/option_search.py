"""Search over machine types, counts, strategies, recomputation and micro-batches.

The largest micro-batch that fits is the fastest one, so a search computes the memory for several
micro-batches and the time for one. Options whose intervals overlap are ties, the simpler one first.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from regauge.machines.catalog import (
    find_instance,
    find_listed_price,
    load_inference_chips,
    load_instances,
    missing_price,
)
from regauge.machines.machine_rates import find_machine, find_precision_obstacle
from regauge.planner import intervals, memory_plan
from regauge.planner.calibration import load_calibration
from regauge.planner.expected_goodput import plan_goodput
from regauge.planner.run_plans.task_plans import compute_step_seconds, judge_memory, plan_tasks
from regauge.system import choices
from regauge.system.errors import SettingsError
from regauge.system.processes import World
from regauge.system.units import GIGA, SECONDS_PER_HOUR

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from regauge.machines.machine_rates import MachineRates
    from regauge.machines.settings import Price
    from regauge.planner.anchors import Anchor
    from regauge.planner.expected_goodput import ExpectedGoodput
    from regauge.planner.run_plans.run_request import TrainingRequest
    from regauge.planner.training_job import Estimate, Recomputation, TrainingJob
    from regauge.planner.training_plan import TrainingPlan
    from regauge.training.strategies import Strategy

RECOMPUTATIONS: tuple[Recomputation, ...] = ("none", "selective", "full")
MAX_COUNT = 64
MAX_MICRO_BATCH = 4096
CHECKPOINT_BYTES = 12
"""Checkpoint bytes per parameter: weights and two moments in fp32."""
CHECKPOINT_GB_PER_SECOND = 1.0
"""Assumed rate at which one machine writes a checkpoint."""
RESTART_SECONDS = 300.0
"""Assumed time from a failure to the next step."""
MAX_LISTED = 10
"""How many options in a ranking are planned in full."""
MAX_PER_TYPE = 2
"""Maximum options in a ranking with the same machine type."""


@dataclass(frozen=True)
class Option:
    """A job on some machines, with time and cost."""

    plan: TrainingPlan
    goodput: ExpectedGoodput
    hours: Estimate | None
    """Run hours, failures included; None if its steps are unknown."""
    usd: Estimate | None
    """Run cost in dollars; None if its steps or the price are unknown."""
    rank: int = 0
    """1 for the best; options with equal ranks are ties."""

    @property
    def name(self) -> str:
        return f"{self.plan.count} x {self.plan.machine.name}"

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Tie order: a measured chip, fewer machines, a simpler strategy, less recomputation."""
        job = self.plan.job
        recomputation = RECOMPUTATIONS.index(job.recomputation)
        is_unmeasured = not load_calibration().has_rows(self.plan.machine.chip)
        return (is_unmeasured, self.plan.count, job.strategy.complexity, recomputation)


class SearchResult(NamedTuple):
    """The options listed by a search, and how many others there are."""

    options: list[Option]
    num_more: int


@dataclass(frozen=True)
class JobCandidate:
    """A job on some machines with seconds per step, before it is planned in full."""

    job: TrainingJob
    machine: MachineRates
    count: int
    seconds: float
    verdict: memory_plan.Verdict


def list_machines(price: Price) -> list[MachineRates]:
    """Return the machine types with accelerators that can train and have a price.

    Raises SettingsError if the catalog does not have a price in the region.
    """
    machines = []
    for name, instance in load_instances().items():
        if not instance.chips or instance.chip in load_inference_chips():
            continue
        try:
            machine = apply_price(find_machine(name), price)
        except SettingsError:  # the memory of its chip is unknown
            continue
        if has_known_speed(machine) and machine.usd_per_hour is not None:
            machines.append(machine)
    if not machines:
        raise missing_price(price.region)
    return machines


def has_known_speed(machine: MachineRates) -> bool:
    """Return whether measured rows or a data sheet give the machine's speed."""
    return machine.peak_flops is not None or load_calibration().has_rows(machine.chip)


def apply_price(machine: MachineRates, price: Price) -> MachineRates:
    """Return a machine with the price the user pays in the configured region."""
    listed = find_listed_price(find_instance(machine.name), price.discounts, price.region)
    return replace(machine, usd_per_hour=listed.usd_per_hour if listed else None)


def plan_option(
    request: TrainingRequest,
    job: TrainingJob,
    machine: MachineRates,
    count: int,
    runs: Iterable[Anchor] = (),
) -> Option:
    """Return a job on `count` machines with hours and dollars, failures included."""
    plan = plan_tasks(request, job, machine, count, runs)
    parameters = job.shape.parameters(job.head)
    checkpoint = CHECKPOINT_BYTES * parameters / (CHECKPOINT_GB_PER_SECOND * GIGA * count)
    goodput = plan_goodput(count, checkpoint, RESTART_SECONDS)
    if request.steps is None or not goodput.share:
        return Option(plan, goodput, None, None)
    hours = plan.hours(request.steps, goodput.share)
    return Option(plan, goodput, hours, plan.usd(request.steps, goodput.share))


def choose_settings(
    request: TrainingRequest, machine: MachineRates, count: int, *, is_free: bool = True
) -> JobCandidate | None:
    """Return the fastest settings that fit on `count` machines; None if nothing fits.

    Without `is_free`, strategy and recomputation come from the run file.
    """
    candidates = list(_list_candidates(request, machine, count, is_free=is_free))
    for verdict in ("fits", "undecided"):
        if fitting := [item for item in candidates if item.verdict == verdict]:
            return min(fitting, key=lambda item: item.seconds)
    return None


def _list_candidates(
    request: TrainingRequest, machine: MachineRates, count: int, *, is_free: bool
) -> Iterator[JobCandidate]:
    """Yield the largest micro-batch that fits for each strategy and recomputation."""
    job = request.job
    strategies = list_strategies(request, machine, count) if is_free else [job.strategy]
    recomputations = RECOMPUTATIONS if is_free else (job.recomputation,)
    for strategy in strategies:
        for recomputation in recomputations:
            variant = replace(request.job, strategy=strategy, recomputation=recomputation)
            placed = _find_largest(request, variant, machine, count)
            if placed is not None:
                seconds = compute_step_seconds(request, placed[0], machine, count)
                yield JobCandidate(placed[0], machine, count, seconds, placed[1])


def list_strategies(request: TrainingRequest, machine: MachineRates, count: int) -> list[Strategy]:
    """Return the strategies that a run can use on machines, simplest first."""
    world = World(size=machine.devices * count, local_size=machine.devices)
    adapted = [strategy.adapt(machine.devices) for strategy in _load_strategies()]
    optimizer = request.run.optimizer.kind
    usable = [item for item in adapted if item.obstacle(world, optimizer) is None]
    return usable[:1] if world.size == 1 else usable


@cache
def _load_strategies() -> tuple[Strategy, ...]:
    names = choices.names("strategies")
    strategies: list[Strategy] = [choices.load("strategies", name)() for name in names]
    return tuple(sorted(strategies, key=lambda strategy: strategy.complexity))


def _find_largest(
    request: TrainingRequest, variant: TrainingJob, machine: MachineRates, count: int
) -> tuple[TrainingJob, memory_plan.Verdict] | None:
    """Return the job with the largest micro-batch that fits, or may fit; None if none may."""
    best: tuple[TrainingJob, memory_plan.Verdict] | None = None
    previous = 0
    for size in _list_micro_batches(request):
        job = replace(request, job=variant).place(machine.devices * count, size)
        if job is None or job.micro_batch == previous:
            break
        previous = job.micro_batch
        verdict = judge_memory(request, job, machine, count)
        if verdict == "does not fit" or (best is not None and verdict != best[1]):
            break
        best = job, verdict
    return best


def _list_micro_batches(request: TrainingRequest) -> tuple[int, ...]:
    if request.micro_batch is not None:
        return (request.micro_batch,)
    sizes = range(MAX_MICRO_BATCH.bit_length())
    return tuple(request.sequences_per_row * 2**power for power in sizes)


def shrink_to_fit(
    request: TrainingRequest, candidate: JobCandidate, runs: Sequence[Anchor] = ()
) -> JobCandidate:
    """Return a candidate with a micro-batch that fits after correcting by measured rows.

    The formulas alone decide in a search, as it compares thousands of candidates. If no smaller
    micro-batch fits, the candidate is returned as it is.
    """
    machine, count = candidate.machine, candidate.count
    variant = replace(request, job=candidate.job)
    size = candidate.job.micro_batch
    while size and (job := variant.place(machine.devices * count, size)) is not None:
        verdict = plan_tasks(request, job, machine, count, runs).memory.verdict
        if verdict == "fits":
            seconds = compute_step_seconds(request, job, machine, count)
            return replace(candidate, job=job, seconds=seconds, verdict=verdict)
        size //= 2
    return candidate


def place_job(request: TrainingRequest, machine: MachineRates, count: int) -> TrainingJob:
    """Return a run file's job on machines; an open micro-batch is the largest that fits.

    Raises SettingsError if the machines cannot train, if their speed is unknown, or if they have
    more devices than the batch has rows.
    """
    check_machine(machine, request.run.execution.precision)
    devices = machine.devices * count
    if request.place(devices) is None:
        rows = request.smallest_task.run.batch.rows
        problem = f"batch.rows = {rows} is less than the {devices} devices"
        raise SettingsError(problem, f"set batch.rows to {devices} or more, or use fewer machines")
    if request.micro_batch is None:
        candidate = choose_settings(request, machine, count, is_free=False)
        if candidate is not None:
            return shrink_to_fit(request, candidate).job
    job = request.place(devices, request.micro_batch or request.sequences_per_row)
    return job or request.job


def use_processes(request: TrainingRequest, machine: MachineRates) -> MachineRates:
    """Return a machine with the run file's `processes`; raises SettingsError for too many."""
    execution = request.run.execution
    processes = execution.processes
    if "processes" not in execution.model_fields_set or processes == "auto":
        return machine
    if processes > machine.devices:
        problem = f"execution.processes = {processes}, and {machine.name} has {machine.devices}"
        remedy = 'set execution.processes = "auto", or name a larger machine type'
        raise SettingsError(f"{problem} devices", remedy)
    return replace(machine, devices=processes)


def check_machine(machine: MachineRates, precision: str) -> None:
    """Raise SettingsError if a machine cannot train in a precision, or if its speed is unknown."""
    if (obstacle := find_precision_obstacle(machine.chip, precision)) is not None:
        raise SettingsError(obstacle, "set execution.precision, or name another machine type")
    if machine.chip in load_inference_chips():
        problem = f"{machine.name} has {machine.chip}, which cannot train"
        raise SettingsError(problem, "name a machine type for training, such as trn1.32xlarge")
    if not has_known_speed(machine):
        problem = f"the speed of {machine.chip} is neither in the catalog nor measured"
        raise SettingsError(problem, "add it with: regauge catalog import FILE")


def find_cheapest_change(
    request: TrainingRequest, machine: MachineRates, count: int, max_count: int = MAX_COUNT
) -> JobCandidate | None:
    """Return the settings that fit for the fewest dollars; None if nothing fits.

    More machines are the last resort.
    """
    free = replace(request, micro_batch=None)
    while count <= max_count:
        candidates = _list_candidates(free, machine, count, is_free=True)
        changed = [shrink_to_fit(request, item) for item in candidates]
        fitting = [item for item in changed if item.verdict == "fits"]
        if fitting:
            return min(fitting, key=lambda item: item.seconds)
        count *= 2
    return None


def search_options(
    request: TrainingRequest,
    machines: Sequence[MachineRates],
    deadline_hours: float | None,
    runs: Sequence[Anchor] = (),
    max_count: int = MAX_COUNT,
    *,
    show_all: bool = False,
) -> SearchResult:
    """Return the cheapest options that meet a deadline, ranked; the best are planned in full.

    An option meets the deadline if its p90 does. Raises SettingsError if the run's steps are
    unknown, if the model does not fit on any machines, and if no option meets the deadline.
    """
    if request.steps is None:
        problem = "the hours of the run are unknown: its data is not prepared, and it has no steps"
        raise SettingsError(problem, "run 'regauge prepare', or set stop.steps")
    candidates = [
        candidate
        for machine in machines
        for count in _list_counts(max_count)
        if (candidate := choose_settings(request, machine, count)) is not None
    ]
    if not candidates:
        raise SettingsError(
            f"the model does not fit on any catalog machines, up to {max_count} of a type",
            "reduce model.config or batch, or raise --max-nodes",
        )
    usable = _select_usable(request, candidates, deadline_hours)
    options = _plan_best(request, usable, deadline_hours, runs, show_all=show_all)
    if not options and not deadline_hours:
        raise SettingsError(
            "the model does not surely fit on any catalog machines",
            "plan single options with --compare, or reduce batch and model.config",
        )
    if not options:
        fastest = min(candidates, key=lambda item: item.seconds)
        option = plan_option(request, fastest.job, fastest.machine, fastest.count, runs)
        hours = option.hours.p90 if option.hours else float("inf")
        problem = f"no machines finish within {deadline_hours:g} h"
        remedy = f"allow {hours:.3g} h, the p90 of the fastest option, {option.name}"
        raise SettingsError(problem, remedy)
    return SearchResult(rank_options(options), 0 if show_all else len(usable) - len(options))


def _list_counts(max_count: int) -> list[int]:
    counts = [2**power for power in range(max_count.bit_length())]
    return sorted({*counts, max_count})


def _plan_best(
    request: TrainingRequest,
    candidates: Sequence[JobCandidate],
    deadline_hours: float | None,
    runs: Sequence[Anchor],
    *,
    show_all: bool,
) -> list[Option]:
    """Return full plans for the cheapest usable candidates that meet the deadline at p90."""
    is_sure = any(item.verdict == "fits" for item in candidates)
    options: list[Option] = []
    counts: Counter[str] = Counter()
    for item in candidates:
        if counts[item.machine.name] == MAX_PER_TYPE and not show_all:
            continue
        fitting = shrink_to_fit(request, item, runs)
        option = plan_option(request, fitting.job, item.machine, item.count, runs)
        if is_sure and option.plan.memory.verdict != "fits":
            continue
        is_late = option.hours is None or (deadline_hours and option.hours.p90 > deadline_hours)
        if not is_late:
            options.append(option)
            counts[item.machine.name] += 1
        if len(options) == MAX_LISTED and not show_all:
            break
    return options


def _select_usable(
    request: TrainingRequest, candidates: Sequence[JobCandidate], deadline_hours: float | None
) -> list[JobCandidate]:
    """Return the candidates that surely fit and meet the deadline at p50, cheapest first."""
    is_sure = any(item.verdict == "fits" for item in candidates)
    limit = (deadline_hours or math.inf) * SECONDS_PER_HOUR / (request.steps or 1)
    usable = [item for item in candidates if item.verdict == "fits" or not is_sure]
    return sorted((item for item in usable if item.seconds <= limit), key=_cost_per_step)


def _cost_per_step(item: JobCandidate) -> float:
    return item.seconds * item.count * (item.machine.usd_per_hour or float("inf"))


def rank_options(options: Sequence[Option]) -> list[Option]:
    """Rank options by dollars, or by hours if a price is unknown, with equal ranks for ties.

    An option's 74th percentile decides, so that a wide interval costs. Options that tie with the
    first one in their group are ordered by simplicity; those on measured chips come first.
    """
    has_prices = all(option.usd is not None for option in options)

    def value(option: Option) -> Estimate:
        return (option.usd if has_prices else option.hours) or option.plan.step_seconds

    left = sorted(options, key=lambda item: value(item).p50 * value(item).p90)
    ranked: list[Option] = []
    while left:
        group = [item for item in left if intervals.overlaps(value(left[0]), value(item))]
        rank = len(ranked) + 1
        ranked += [
            replace(item, rank=rank) for item in sorted(group, key=lambda item: item.simplicity)
        ]
        left = [item for item in left if item not in group]
    return ranked
