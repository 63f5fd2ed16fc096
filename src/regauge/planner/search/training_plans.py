"""Plans in the verb `plan`: one option, a comparison, a search, and the time to a target."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from regauge import config
from regauge.machines.machine_rates import find_precision_obstacle
from regauge.planner import run_history
from regauge.planner.run_plans import option_search
from regauge.planner.run_plans.explain_plan import explain_plan
from regauge.planner.run_plans.pipeline_stage import select_stage
from regauge.planner.run_plans.plan_document import (
    describe_confidence,
    describe_estimate,
    describe_option,
    describe_plan,
    describe_scaling,
    describe_settings,
    list_price_warnings,
)
from regauge.planner.run_plans.run_request import read_request
from regauge.planner.run_plans.target_curve import combine, forecast_target
from regauge.planner.search.select_machines import parse_hours, select_machines
from regauge.planner.training_job import Estimate
from regauge.system import choices
from regauge.system.errors import InconclusiveError, PreflightError, SettingsError
from regauge.system.units import GIGA, SECONDS_PER_HOUR
from regauge.training.settings import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from regauge.machines.machine_rates import MachineRates
    from regauge.planner.anchors import Anchor
    from regauge.planner.run_plans.option_search import Option
    from regauge.planner.run_plans.run_request import TrainingRequest
    from regauge.planner.run_plans.target_curve import TargetForecast
    from regauge.planner.search.plan_options import Machines
    from regauge.planner.training_job import TrainingJob

OTHER_TABLES = frozenset(
    {
        *("artifact", "benchmark", "buckets", "candidates", "closed_loop", "cluster"),
        *("comparison", "evaluate", "export", "filter", "gate", "generation", "image"),
        *("inference", "launch", "models", "open_loop", "parity", "predict", "prepare"),
        *("prometheus", "promote", "registry", "regression", "repeat", "replay", "report"),
        *("rows", "saturation", "serve", "server", "source", "split", "stage", "text"),
        *("tokenizer", "trace", "validation", "weights"),
    }
)
"""Other verbs' tables that a run file may have."""
REFUSED = SettingsError.exit_code
"""Exit code for a plan that misses its deadline."""
EXIT_CODES = {"does not fit": PreflightError.exit_code, "undecided": InconclusiveError.exit_code}
"""Exit codes for plans that do not surely fit."""


def read_tables(run_file: Path, overrides: tuple[str, ...], stage: str | None) -> config.Tables:
    """Return a training run's tables; raises SettingsError for an unknown one."""
    tables = select_stage(config.read(run_file), stage)
    tables = config.apply_overrides(tables, overrides, TrainSettings)
    known = {*TrainSettings.model_fields, *OTHER_TABLES}
    for name in tables:
        if name not in known:
            problem = f"{run_file}: unknown table '{name}'"
            raise SettingsError(problem, choices.did_you_mean(name, sorted(known)))
    return tables


def read_run(tables: config.Tables, run_file: Path) -> TrainingRequest:
    """Return the training run in tables; raises SettingsError for an invalid one."""
    request = read_request(tables, run_file)
    instance = (tables.get("launch") or {}).get("instance")
    if instance and request.run.execution.price.instance is None:
        price = request.run.execution.price.model_copy(update={"instance": instance})
        execution = request.run.execution.model_copy(update={"price": price})
        request = replace(request, run=request.run.model_copy(update={"execution": execution}))
    return request


def plan_run(
    request: TrainingRequest,
    machines: Machines,
    to_target: Path | None,
    probes: Sequence[Anchor] = (),
    *,
    explain: bool,
) -> dict[str, Any]:
    """Return the plan requested on the command line; raises SettingsError for contradictions.

    `probes`: runs measured for this plan.
    """
    measured = {probe.run_id for probe in probes}
    earlier = [run for run in run_history.load_history() if run.run_id not in measured]
    runs = (*earlier, *probes)
    if to_target is not None:
        return plan_target(request, machines, to_target, runs)
    selected = [] if machines.cheapest else select_machines(request, machines, runs)
    if machines.cheapest or machines.compare or len(selected) > 1:
        return rank(request, machines, runs)
    ((machine, count),) = selected
    if machine.name != run_history.LOCAL:
        machine = option_search.use_processes(request, machine)
    elif request.run.execution.precision == "auto":
        job = replace(request.job, precision=run_history.find_local_precision(runs))
        request = replace(request, job=job)
    return plan_one(request, machine, count, machines.deadline, runs, explain=explain)


def probe_machine(request: TrainingRequest, tables: config.Tables) -> list[Anchor]:
    """Return a run's measured steps on this machine, and record them for later plans."""
    from regauge.planner.run_plans.local_probe import ProbedRun, probe_run

    shapes = len(request.lengths.shapes)
    measured = probe_run(ProbedRun(tables, request.steps, shapes))
    for anchor in measured:
        run_history.record_run(anchor)
    return measured


def plan_one(
    request: TrainingRequest,
    machine: MachineRates,
    count: int,
    deadline: str | None = None,
    runs: Sequence[Anchor] = (),
    *,
    explain: bool = False,
) -> dict[str, Any]:
    """Return a run's whole plan on `count` machines.

    `error` and `code` are added if the run does not fit, or if it misses the deadline.
    """
    job = option_search.place_job(request, machine, count)
    option = option_search.plan_option(request, job, machine, count, runs)
    answer = describe_plan(request, option)
    answer["scaling"] = _plan_scaling(request, machine, count, runs)
    answer |= describe_confidence(option.plan, runs)
    if explain:
        answer["formulas"] = explain_plan(option)
    answer["notes"] = [*request.notes, *option.plan.notes]
    answer["warnings"] = _list_warnings(request, [option])
    return answer | _find_refusal(request, option, deadline)


def _plan_scaling(
    request: TrainingRequest, machine: MachineRates, count: int, runs: Sequence[Anchor]
) -> list[dict[str, Any]]:
    """Return the scaling curve over machines, or over this machine's processes."""
    if machine.name != run_history.LOCAL:
        scaled = [(machine, number) for number in _list_counts(count)]
    else:
        precision = request.job.precision
        local = [
            run_history.find_local_machine(runs, number, precision)
            for number in _list_counts(machine.devices)
        ]
        scaled = [(replace(item, usd_per_hour=machine.usd_per_hour), 1) for item in local]
    options = [
        option_search.plan_option(request, placed, rates, number, runs)
        for rates, number in scaled
        if (placed := request.place(rates.devices * number, request.micro_batch)) is not None
    ]
    return describe_scaling(request, options)


def _list_warnings(request: TrainingRequest, options: Sequence[Option]) -> list[str]:
    machines = [option.plan.machine for option in options]
    prices = [(machine.name, machine.usd_per_hour) for machine in machines]
    today = dt.datetime.now(dt.UTC).date()
    return list_price_warnings(prices, request.run.execution.price, today)


def _list_counts(count: int) -> list[int]:
    return sorted({*(2**power for power in range(count.bit_length())), count})


def _find_refusal(request: TrainingRequest, option: Option, deadline: str | None) -> dict[str, Any]:
    """Return why a plan cannot be used, with the change that makes it fit; empty otherwise."""
    plan = option.plan
    verdict, total = plan.memory.verdict, plan.memory.total.scale(1 / GIGA)
    if verdict != "fits":
        change = option_search.find_cheapest_change(request, plan.machine, plan.count)
        text = _describe_change(request, plan.job, plan.count, change)
        capacity = f"it has {plan.memory.capacity / GIGA:.3g} GB"
        problem = f"the run needs {total.p50:.3g} GB of each device, and {capacity}"
        if verdict == "undecided":
            problem = f"undecided: the run needs {total.p10:.3g} to {total.p90:.3g} GB of each"
            problem += f" device, and {capacity}"
        error = f"{problem}; {text}"
        return {"change": text, "error": error, "code": EXIT_CODES[verdict]}
    answer: dict[str, Any] = {}
    if deadline is not None and option.hours is not None:
        limit = parse_hours(deadline)
        if option.hours.p90 > limit:
            problem = f"the run takes up to {option.hours.p90:.3g} h (p90), not {limit:g} h"
            remedy = "use more machines, or search with --cheapest"
            return answer | {"error": f"{problem}; {remedy}", "code": REFUSED}
    return answer


def _describe_change(
    request: TrainingRequest,
    job: TrainingJob,
    count: int,
    change: option_search.JobCandidate | None,
) -> str:
    """Return the settings to change so that a run surely fits, as run file overrides."""
    if change is None:
        return "nothing that the planner may change makes it fit: use a smaller model"
    before, after = describe_settings(request, job), describe_settings(request, change.job)
    settings = [f"{key}={value}" for key, value in after.items() if before.get(key) != value]
    settings = [text for text in settings if not text.startswith("accumulation")]
    if change.count != count:
        settings.append(f"--on {change.machine.name}:{change.count}")
    price = change.machine.usd_per_hour
    cost = f"step {change.seconds:.3g} s"
    if request.steps and price is not None:
        hours = change.seconds * change.count * request.steps / SECONDS_PER_HOUR
        cost += f", {hours * price:.3g} USD"
    return f"it fits with: {' '.join(settings)} ({cost})"


def rank(
    request: TrainingRequest, machines: Machines, runs: Sequence[Anchor] = ()
) -> dict[str, Any]:
    """Return options ranked by dollars; equal ranks are ties."""
    deadline = None if machines.deadline is None else parse_hours(machines.deadline)
    options, more, left_out = _list_options(request, machines, deadline, runs)
    rows = [describe_option(request, option) for option in options]
    ties = sum(option.rank == options[0].rank for option in options)
    notes = [*request.notes, *dict.fromkeys(note for o in options for note in o.plan.notes)]
    notes += left_out
    if ties > 1:
        notes.append(f"the first {ties} options are ties: the planner cannot tell them apart")
    answer: dict[str, Any] = {"steps": request.steps, "options": rows, "more_options": more}
    return answer | {"notes": notes, "warnings": _list_warnings(request, options)}


def _list_options(
    request: TrainingRequest, machines: Machines, deadline: float | None, runs: Sequence[Anchor]
) -> tuple[list[Option], int, list[str]]:
    """Return the ranked options, how many more a search found, and machines left out."""
    if not machines.cheapest:
        options, left_out = compare(request, select_machines(request, machines), deadline, runs)
        return options, 0, left_out
    free, execution = replace(request, micro_batch=None), request.run.execution
    listed = [
        machine
        for machine in option_search.list_machines(execution.price)
        if find_precision_obstacle(machine.chip, execution.precision) is None
    ]
    result = option_search.search_options(
        free, listed, deadline, runs, machines.max_nodes, show_all=machines.show_all
    )
    return result.options, result.num_more, []


def compare(
    request: TrainingRequest,
    selected: Sequence[tuple[MachineRates, int]],
    deadline: float | None,
    runs: Sequence[Anchor],
) -> tuple[list[Option], list[str]]:
    """Return the named machines ranked, each with the run file's settings if these fit.

    Otherwise the settings are chosen. Also returns why machines are left out. Raises SettingsError
    if the run does not fit on any of them, or if all of them miss the deadline.
    """
    options: list[Option] = []
    left_out: list[str] = []
    for machine, count in selected:
        name, precision = f"{count} x {machine.name}", request.run.execution.precision
        if (obstacle := find_precision_obstacle(machine.chip, precision)) is not None:
            left_out.append(f"left out {name}: {obstacle}")
            continue
        candidate = option_search.choose_settings(request, machine, count, is_free=False)
        free = replace(request, micro_batch=None)
        candidate = candidate or option_search.choose_settings(free, machine, count)
        if candidate is not None:
            fitting = option_search.shrink_to_fit(request, candidate, runs)
            options.append(option_search.plan_option(request, fitting.job, machine, count, runs))
        elif request.place(machine.devices * count) is None:
            left_out.append(f"left out {name}: batch.rows is less than its devices")
        else:
            left_out.append(f"left out {name}: the run does not fit")
    if not options:
        raise SettingsError("; ".join(left_out), "search with --cheapest")
    fastest = min(options, key=lambda item: item.plan.step_seconds.p50)
    late = [option for option in options if deadline and not _finishes(option, deadline)]
    left_out += [f"left out {option.name}: it misses the deadline" for option in late]
    in_time = [option for option in options if option not in late]
    if not in_time and fastest.hours is not None:
        problem = f"none of these machines finishes within {deadline:g} h"
        remedy = f"allow {fastest.hours.p90:.3g} h, the p90 of {fastest.name}"
        raise SettingsError(problem, remedy)
    return option_search.rank_options(in_time or options), left_out


def plan_target(
    request: TrainingRequest, machines: Machines, folder: Path, runs: Sequence[Anchor]
) -> dict[str, Any]:
    """Return the time and dollars to `stop.target` on each option, from a short run.

    Raises SettingsError without a target, if the curve never reaches it, and if no option meets
    the deadline.
    """
    target = request.run.stop.target
    if target is None:
        raise SettingsError("the run file has no stop.target", "set its metric and at_least")
    forecast = forecast_target(folder, target)
    if not math.isfinite(forecast.steps.p50):
        share = f"{100 * forecast.reach_probability:.0f} %"
        problem = (
            f"the curve of {target.metric} reaches {target.threshold:g} in {share} of the fits"
        )
        raise SettingsError(problem, f"lower the target: the best value is {forecast.best_value:g}")
    request = replace(request, steps=max(round(forecast.steps.p50), 1))
    deadline = None if machines.deadline is None else parse_hours(machines.deadline)
    limit = deadline if machines.cheapest else None
    options, more, _ = _list_options(request, machines, limit, runs)
    options = [_spread(option, forecast) for option in options]
    in_time = [item for item in options if deadline is None or _finishes(item, deadline)]
    if not in_time:
        best = min((item.hours.p90 for item in options if item.hours), default=math.inf)
        problem = f"no option reaches the target within {deadline:g} h with 90 % probability"
        raise SettingsError(problem, f"allow {best:.3g} h, or use more machines")
    return {
        "target": f"{target.metric} {'>=' if target.at_least is not None else '<='}"
        f" {target.threshold:g}",
        "evaluations": forecast.num_points,
        "last_step": forecast.last_step,
        "best_value": forecast.best_value,
        "reach_probability": round(forecast.reach_probability, 3),
        "steps": describe_estimate(forecast.steps),
        "options": [describe_option(request, item) for item in option_search.rank_options(in_time)],
        "more_options": more,
        "notes": list(request.notes),
    }


def _finishes(option: Option, deadline: float) -> bool:
    return option.hours is not None and option.hours.p90 <= deadline


def _spread(option: Option, forecast: TargetForecast) -> Option:
    """Return an option whose interval includes the uncertainty in the steps."""
    steps = forecast.steps
    relative = Estimate(steps.p10 / steps.p50, 1.0, steps.p90 / steps.p50)
    hours = None if option.hours is None else combine(option.hours, relative)
    usd = None if option.usd is None else combine(option.usd, relative)
    return replace(option, hours=hours, usd=usd)
