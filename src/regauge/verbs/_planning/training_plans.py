"""The plans of the verb `plan`: one option, a comparison, a search, and the time to a target."""

from __future__ import annotations

import datetime as dt
import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from regauge import choices, config, verbs
from regauge.errors import SettingsError
from regauge.planning import anchors
from regauge.planning.machines import find_machine
from regauge.planning.training_job import Estimate
from regauge.run_plans import option_search
from regauge.run_plans.explain_plan import explain_plan
from regauge.run_plans.pipeline_stage import select_stage
from regauge.run_plans.plan_document import (
    describe_confidence,
    describe_estimate,
    describe_option,
    describe_plan,
    describe_scaling,
    describe_settings,
    format_answer,
    list_warnings,
)
from regauge.run_plans.run_request import read_request
from regauge.run_plans.target_curve import combine, forecast_target
from regauge.supervision.settings import parse_node_range
from regauge.training.settings import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from regauge.planning.anchors import Anchor
    from regauge.planning.training_job import MachineRates, TrainingJob
    from regauge.run_plans.option_search import Option
    from regauge.run_plans.run_request import TrainingRequest
    from regauge.run_plans.target_curve import TargetForecast
    from regauge.verbs._planning.plan_options import Machines

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
"""Tables of other verbs that a run file may have."""
HOURS = {"d": 24.0, "h": 1.0, "m": 1 / 60, "s": 1 / 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([dhms])")
_MACHINES = re.compile(r"([^:\s]+)(?::(\d+))?")
SHORT_NAMES = {
    "recomputation": "recompute",
    "microbatch_rows": "rows",
    "step_seconds": "step s",
    "tokens_per_second": "tokens/s",
    "weak_scaling_efficiency": "weak eff.",
    "efficiency": "eff.",
}
"""Names of columns in the text format."""
REFUSED = 2
"""Exit code of a plan that does not fit or misses its deadline."""


def read_run(run_file: Path, overrides: tuple[str, ...], stage: str | None) -> TrainingRequest:
    """Return the training run of a run file; raises SettingsError for an invalid one."""
    tables = select_stage(config.read(run_file), stage)
    tables = config.apply_overrides(tables, overrides, TrainSettings)
    known = {*TrainSettings.model_fields, *OTHER_TABLES}
    for name in tables:
        if name not in known:
            problem = f"{run_file}: unknown table '{name}'"
            raise SettingsError(problem, choices.did_you_mean(name, sorted(known)))
    request = read_request(tables, run_file)
    instance = (tables.get("launch") or {}).get("instance")
    if instance and request.run.execution.price.instance is None:
        price = request.run.execution.price.model_copy(update={"instance": instance})
        execution = request.run.execution.model_copy(update={"price": price})
        request = replace(request, run=request.run.model_copy(update={"execution": execution}))
    return request


def plan_run(
    request: TrainingRequest, machines: Machines, to_target: Path | None, *, explain: bool
) -> dict[str, Any]:
    """Return the plan that the command line requests; raises SettingsError if it contradicts."""
    _check_machines(machines)
    runs = anchors.load_history()
    if to_target is not None:
        return plan_target(request, machines, to_target, runs)
    if machines.cheapest or machines.compare:
        return rank(request, machines, runs)
    ((machine, count),) = select_machines(request, machines)
    return plan_one(request, machine, count, machines.deadline, runs, explain=explain)


def _check_machines(machines: Machines) -> None:
    """Raise SettingsError for options that exclude each other."""
    names = [name for name in ("on", "compare", "cheapest") if getattr(machines, name)]
    if len(names) > 1:
        problem = f"--{names[0]} and --{names[1]} contradict each other"
        raise SettingsError(problem, "use one of them")
    if machines.max_nodes < 1:
        raise SettingsError(f"--max-nodes {machines.max_nodes} is below 1", "allow a machine")
    if machines.deadline is not None:
        parse_hours(machines.deadline)


def parse_hours(text: str) -> float:
    """Return the hours of a duration such as `7d`, `12h`, `90m`; raises SettingsError."""
    match = _DURATION.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise SettingsError(f"--deadline {text} is no duration", "write it as 7d, 12h or 90m")
    return float(match[1]) * HOURS[match[2]]


def select_machines(request: TrainingRequest, machines: Machines) -> list[tuple[MachineRates, int]]:
    """Return the requested machine types with their counts.

    Without an option they are those of the run file. Raises SettingsError for an unknown type.
    """
    execution = request.run.execution
    key = "--on" if machines.on else "--compare"
    text = machines.on or machines.compare
    if text is None:
        name = execution.price.instance
        if name is None:
            problem = "the plan needs a machine type, and the run file has none"
            raise SettingsError(problem, "write --on p5.48xlarge:2, --compare, or --cheapest")
        _, count = parse_node_range(execution.nodes.count or 1)
        key, text = "execution.price.instance", f"{name}:{count}"
    return [_parse_machines(item.strip(), key, request) for item in text.split(",")]


def _parse_machines(text: str, key: str, request: TrainingRequest) -> tuple[MachineRates, int]:
    match = _MACHINES.fullmatch(text)
    if match is None or match[2] == "0":
        problem = f"{key}: '{text}' is no machine type with a count"
        raise SettingsError(problem, "write it as p5.48xlarge:16")
    price = request.run.execution.price
    machine = option_search.apply_discounts(find_machine(match[1], key), price.discounts)
    if price.usd_per_hour is not None and price.instance in (None, machine.name):
        machine = replace(machine, usd_per_hour=price.usd_per_hour)
    return machine, int(match[2] or 1)


def plan_one(
    request: TrainingRequest,
    machine: MachineRates,
    count: int,
    deadline: str | None = None,
    runs: Sequence[Anchor] = (),
    *,
    explain: bool = False,
) -> dict[str, Any]:
    """Return the whole plan of a run on `count` machines.

    `error` and `code` are added if the run does not fit, or if it misses the deadline.
    """
    job = option_search.place_job(request, machine, count)
    option = option_search.plan_option(request, job, machine, count, runs)
    answer = describe_plan(request, option)
    scaling = [
        option_search.plan_option(request, placed, machine, number, runs)
        for number in _list_counts(count)
        if (placed := request.place(machine.devices * number, request.micro_batch)) is not None
    ]
    answer["scaling"] = describe_scaling(request, scaling)
    answer |= describe_confidence(option.plan, runs)
    if explain:
        answer["formulas"] = explain_plan(option)
    answer["notes"] = [*request.notes, *option.plan.notes]
    answer["warnings"] = list_warnings([option], _today())
    return answer | _find_refusal(request, option, deadline)


def _today() -> dt.date:
    return dt.datetime.now(dt.UTC).date()


def _list_counts(count: int) -> list[int]:
    return sorted({*(2**power for power in range(count.bit_length())), count})


def _find_refusal(request: TrainingRequest, option: Option, deadline: str | None) -> dict[str, Any]:
    """Return why a plan cannot be used, with the change that makes it fit; empty if it can."""
    plan = option.plan
    answer: dict[str, Any] = {}
    if plan.memory.verdict != "fits":
        change = option_search.find_smallest_change(request, plan.machine, plan.count)
        answer["change"] = _describe_change(request, plan.job, plan.count, change)
    if plan.memory.verdict == "does not fit":
        gigabytes, capacity = plan.memory.total.p50 / 1e9, plan.memory.capacity / 1e9
        problem = f"the run needs {gigabytes:.3g} GB of each device, and it has {capacity:.3g} GB"
        return answer | {"error": f"{problem}; {answer['change']}", "code": REFUSED}
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
    """Return the settings to change so that a run surely fits, as overrides of the run file."""
    if change is None:
        return "nothing that the planner may change makes it fit: use a smaller model"
    before, after = describe_settings(request, job), describe_settings(request, change.job)
    settings = [f"{key}={value}" for key, value in after.items() if before[key] != value]
    settings = [text for text in settings if not text.startswith("accumulation")]
    if change.count != count:
        settings.append(f"--on {change.machine.name}:{change.count}")
    return f"it fits with: {' '.join(settings)} (step {change.seconds:.3g} s)"


def rank(
    request: TrainingRequest, machines: Machines, runs: Sequence[Anchor] = ()
) -> dict[str, Any]:
    """Return options ranked by dollars; options of equal rank are ties."""
    deadline = None if machines.deadline is None else parse_hours(machines.deadline)
    if machines.cheapest:
        free = replace(request, micro_batch=None)
        listed = option_search.list_machines(request.run.execution.price.discounts)
        options = option_search.search_options(free, listed, deadline, runs, machines.max_nodes)
    else:
        options = compare(request, select_machines(request, machines), deadline, runs)
    rows = [describe_option(request, option) for option in options]
    ties = sum(option.rank == options[0].rank for option in options)
    notes = [*request.notes, *dict.fromkeys(note for o in options for note in o.plan.notes)]
    if ties > 1:
        notes.append(f"the first {ties} options are ties: the planner cannot tell them apart")
    answer: dict[str, Any] = {"steps": request.steps, "options": rows}
    return answer | {"notes": notes, "warnings": list_warnings(options, _today())}


def compare(
    request: TrainingRequest,
    selected: Sequence[tuple[MachineRates, int]],
    deadline: float | None,
    runs: Sequence[Anchor],
) -> list[Option]:
    """Return the named machines ranked, each with the settings of the run file if these fit.

    Otherwise the settings are chosen. Raises SettingsError if the run fits on none of them, or if
    all of them miss the deadline.
    """
    options = []
    for machine, count in selected:
        candidate = option_search.choose_settings(request, machine, count, is_free=False)
        free = replace(request, micro_batch=None)
        candidate = candidate or option_search.choose_settings(free, machine, count)
        if candidate is not None:
            fitting = option_search.shrink_to_fit(request, candidate, runs)
            options.append(option_search.plan_option(request, fitting.job, machine, count, runs))
    if not options:
        names = ", ".join(f"{count} x {machine.name}" for machine, count in selected)
        raise SettingsError(f"the run fits on none of: {names}", "search with --cheapest")
    fastest = min(options, key=lambda item: item.plan.step_seconds.p50)
    in_time = [
        option
        for option in options
        if deadline is None or (option.hours is not None and option.hours.p90 <= deadline)
    ]
    if not in_time and fastest.hours is not None:
        problem = f"none of these machines finishes within {deadline:g} h"
        remedy = f"allow {fastest.hours.p90:.3g} h, the p90 of {fastest.name}"
        raise SettingsError(problem, remedy)
    return option_search.rank_options(in_time or options)


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
    unlimited = replace(machines, deadline=None)
    if machines.cheapest:
        free = replace(request, micro_batch=None)
        listed = option_search.list_machines(request.run.execution.price.discounts)
        options = option_search.search_options(free, listed, deadline, runs, machines.max_nodes)
    else:
        options = compare(request, select_machines(request, unlimited), None, runs)
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
        "notes": list(request.notes),
    }


def _finishes(option: Option, deadline: float) -> bool:
    return option.hours is not None and option.hours.p90 <= deadline


def _spread(option: Option, forecast: TargetForecast) -> Option:
    """Return an option whose interval has the uncertainty of the steps, too."""
    steps = forecast.steps
    relative = Estimate(steps.p10 / steps.p50, 1.0, steps.p90 / steps.p50)
    hours = None if option.hours is None else combine(option.hours, relative)
    usd = None if option.usd is None else combine(option.usd, relative)
    return replace(option, hours=hours, usd=usd)


def show(answer: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """Print a plan; in the text format an interval is one cell, and a measured row one line."""
    if as_json:
        return verbs.show(answer, as_json=True)
    shown = {
        name: _format_value(name, value)
        for name, value in answer.items()
        if value not in ([], None)
    }
    verbs.show(format_answer(shown), as_json=False)
    return answer


def _format_value(name: str, value: Any) -> Any:
    """Return a value of a plan for the text format."""
    if name == "nearest":
        return [_format_row(row) for row in value]
    if name in ("options", "scaling"):
        return [_shorten(row) for row in value]
    return value


def _format_row(row: dict[str, Any]) -> str:
    """Return a measured row as one line."""
    measured = f"measured {row['measured_seconds']:g} s, planned {row['error_percent']:+g} %"
    return f"{row['row']} ({row['chip']}), distance {row['distance']:g}: {measured}"


def _shorten(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a table with short names and intervals in one cell."""
    short = {}
    for name, value in row.items():
        if name.endswith(("_p10", "_p90")):
            continue
        if f"{name}_p90" in row and value is not None:
            low, high = row[f"{name}_p10"], row[f"{name}_p90"]
            short[name] = f"{value:.3g} ({low:.3g}-{high:.3g})"
        else:
            short[SHORT_NAMES.get(name, name)] = value
    return short
