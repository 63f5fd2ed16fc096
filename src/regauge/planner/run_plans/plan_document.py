"""Plan documents: JSON-ready values with units in their names, and texts with intervals."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from regauge.config import dump
from regauge.machines.catalog import STALE_DAYS, find_instance, find_listed_price
from regauge.planner import training_plan
from regauge.planner.run_history import LOCAL
from regauge.system.units import GIGA

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from regauge.machines.settings import Price
    from regauge.planner.anchors import Anchor
    from regauge.planner.memory_plan import MemoryParts
    from regauge.planner.run_plans.option_search import Option
    from regauge.planner.run_plans.run_request import TrainingRequest
    from regauge.planner.step_time import StepParts
    from regauge.planner.training_job import Estimate, TrainingJob
    from regauge.planner.training_plan import TrainingPlan

UNITS = {"memory_gb": "GB", "step_seconds": "s", "hours": "h", "usd": "USD"}
"""Interval units in the text format."""
GRAPHS_WITHOUT_SHAPE = 3
"""Graphs on a lazy device besides the shapes': two for the optimizer state, the update."""
HISTORY_LENGTH = 5
"""How many of the latest measured runs a plan lists."""


def describe_estimate(estimate: Estimate | None, scale: float = 1.0) -> dict[str, float] | None:
    """Return p10, p50 and p90, divided by `scale`; None if unknown."""
    if estimate is None:
        return None
    return {name: round_digits(value / scale) for name, value in asdict(estimate).items()}


def round_digits(value: float, digits: int = 4) -> float:
    """Return a number with `digits` significant digits."""
    if not value or not math.isfinite(value):
        return value
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))


def format_estimate(estimate: dict[str, float] | None, unit: str) -> str:
    """Return an estimate as text: p50 with p10 to p90."""
    if estimate is None:
        return "unknown"
    values = {name: f"{value:,.4g}" for name, value in estimate.items()}
    interval = f"(p10 {values['p10']}, p90 {values['p90']})"
    return f"{values['p50']} {unit} {interval}" if unit else f"{values['p50']} {interval}"


def format_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document for the text format: an interval is one text."""
    return {name: _format_entry(name, value) for name, value in answer.items()}


def _format_entry(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return format_estimate(value, UNITS.get(name, "")) if "p50" in value else format_answer(value)


def describe_settings(request: TrainingRequest, job: TrainingJob) -> dict[str, Any]:
    """Return a job's settings as run file keys with values."""
    rows = max(job.micro_batch // request.sequences_per_row, 1)
    table = dump(job.strategy, with_defaults=False)
    return {
        "strategy.kind": job.strategy.kind,
        **{f"strategy.{key}": value for key, value in table.items() if key != "kind"},
        "execution.activation_checkpointing": job.recomputation,
        "batch.rows": request.run.batch.rows,
        "batch.microbatch_rows": rows,
        "accumulation": job.accumulation,
    }


def describe_option(request: TrainingRequest, option: Option) -> dict[str, Any]:
    """Return one ranked option as a table row; equal ranks are ties."""
    job, plan = option.plan.job, option.plan
    hours, usd = describe_estimate(option.hours), describe_estimate(option.usd)
    row: dict[str, Any] = {
        "rank": option.rank,
        "machines": option.name,
        "strategy": job.strategy.kind,
        "recomputation": job.recomputation,
        "microbatch_rows": max(job.micro_batch // request.sequences_per_row, 1),
        "memory": plan.memory.verdict,
    }
    for name, values in (("hours", hours), ("usd", usd)):
        row[name] = values["p50"] if values else None
        row[f"{name}_p10"] = values["p10"] if values else None
        row[f"{name}_p90"] = values["p90"] if values else None
    return row


def describe_plan(request: TrainingRequest, option: Option) -> dict[str, Any]:
    """Return memory, time, cost and confidence for a job on some machines."""
    plan = option.plan
    job, machine = plan.job, plan.machine
    tasks = _describe_tasks(request, plan)
    shapes = [shape for task in tasks for shape in task["batch_shapes"]]
    answer: dict[str, Any] = {
        "machines": f"{option.name} ({plan.devices} x {machine.chip})",
        "parameters": round(job.shape.parameters(job.head)),
        "settings": describe_settings(request, job),
        "fits": plan.memory.verdict,
        "memory": _describe_parts(plan.memory.parts, "gb", 1 / GIGA),
        "memory_gb": describe_estimate(plan.memory.total, GIGA),
        "capacity_gb": round_digits(plan.memory.capacity / GIGA),
        "step": _describe_parts(plan.step_parts, "milliseconds", 1000),
        "step_seconds": describe_estimate(plan.step_seconds),
        "tokens_per_second": describe_estimate(plan.tokens_per_second),
        "mfu": _round(plan.mfu),
        "hfu": _round(plan.hfu),
        "real_token_fraction": round(job.useful_fraction, 4),
        "lengths_from": request.lengths.source,
        "batch_shapes": shapes,
        "num_graphs": GRAPHS_WITHOUT_SHAPE + (min(job.accumulation, 2) + 1) * len(shapes),
        "steps": request.steps,
        "goodput": round(option.goodput.share, 4),
        "hours": describe_estimate(option.hours),
        "usd": describe_estimate(option.usd),
        "price": describe_price(option, request.run.execution.price),
    }
    return answer | ({"tasks": tasks} if len(tasks) > 1 else {})


def _describe_tasks(request: TrainingRequest, plan: TrainingPlan) -> list[dict[str, Any]]:
    """Return batch shapes, step and memory for each task in a run."""
    requests = (request, *(other.request for other in request.others))
    return [
        {
            "task": task.name,
            "share_percent": round(100 * share, 1),
            "batch_shapes": [f"{part.job.micro_batch} x {size}" for size in task.lengths.shapes],
            "step_seconds": round_digits(part.step_parts.total),
            "memory_gb": round_digits(part.memory.parts.total / GIGA),
        }
        for task, (share, part) in zip(requests, plan.tasks, strict=True)
    ]


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def describe_forecast(option: Option) -> dict[str, Any]:
    """Return a plan's main numbers, for `launch` and `train --dry-run`."""
    plan = option.plan
    return {
        "machines": option.name,
        "fits": plan.memory.verdict,
        "memory_gb": describe_estimate(plan.memory.total, GIGA),
        "capacity_gb": round_digits(plan.memory.capacity / GIGA),
        "step_seconds": describe_estimate(plan.step_seconds),
        "hours": describe_estimate(option.hours),
        "usd": describe_estimate(option.usd),
    }


def _describe_parts(
    parts: MemoryParts | StepParts, unit: str, scale: float
) -> list[dict[str, Any]]:
    """Return the size of each part in a unit; empty parts are left out."""
    values = {name: value for name, value in asdict(parts).items() if value}
    return [
        {"part": name, unit: round_digits(scale * size), "percent": round(100 * size / parts.total)}
        for name, size in values.items()
    ]


def describe_scaling(request: TrainingRequest, options: Sequence[Option]) -> list[dict[str, Any]]:
    """Return the scaling curve: equal global batch, and equal work per device (weak scaling).

    It is over machines, or over processes of this machine, without weak scaling.
    """
    base = options[0].plan
    is_local = base.machine.name == LOCAL
    counts = [option.plan.count for option in options]
    weak = training_plan.plan_scaling(base.job, base.machine, counts)
    rows = []
    for option, weak_plan in zip(options, weak, strict=True):
        plan, job = option.plan, option.plan.job
        hours, usd = describe_estimate(option.hours), describe_estimate(option.usd)
        speed = plan.tokens_per_second.p50
        share = plan.devices / base.devices if is_local else plan.count / base.count
        row: dict[str, Any] = {
            "processes" if is_local else "machines": plan.devices if is_local else plan.count,
            "microbatch_rows": max(job.micro_batch // request.sequences_per_row, 1),
            "step_seconds": round_digits(plan.step_seconds.p50),
            "tokens_per_second": round_digits(speed),
            "efficiency": round(speed / base.tokens_per_second.p50 / share, 3),
        }
        if not is_local:
            weak_efficiency = training_plan.scaling_efficiency(weak_plan, weak[0])
            row["weak_scaling_efficiency"] = round(weak_efficiency, 3)
        row |= {
            "memory": plan.memory.verdict,
            "hours": hours["p50"] if hours else None,
            "usd": usd["p50"] if usd else None,
        }
        rows.append(row)
    return rows


def describe_confidence(plan: TrainingPlan, runs: Sequence[Anchor]) -> dict[str, Any]:
    """Return the nearest measured rows, and how far the planner was off in the user's runs."""
    nearest = [
        {
            "row": neighbour.anchor.name,
            "chip": neighbour.anchor.features.chip,
            "distance": round(neighbour.distance, 2),
            "measured_seconds": round_digits(neighbour.anchor.measured_seconds or 0.0),
            "error_percent": _find_error(neighbour.anchor, neighbour.anchor.predicted_seconds),
            "source": neighbour.anchor.source,
            "is_own": bool(neighbour.anchor.run_id),
        }
        for neighbour in plan.nearest
    ]
    constants = plan.constants
    speed = f"{constants.chip} under {constants.stack}, {constants.rows} measured rows"
    answer: dict[str, Any] = {
        "speed_from": f"{speed}, deviation {100 * constants.spread:.0f} %",
        "nearest": nearest,
    }
    return answer | describe_history(runs)


def describe_history(runs: Sequence[Anchor]) -> dict[str, Any]:
    """Return how far off earlier plans were in the user's runs, with the latest ones."""
    planned = [(run, _find_error(run, run.planned_seconds)) for run in runs]
    errors = [(run, error) for run, error in planned if error is not None]
    if not errors:
        return {}
    absolute = sorted(abs(error) for _, error in errors)
    latest = [
        {
            "run": run.name,
            "date": run.date,
            "measured_seconds": round_digits(run.measured_seconds or 0.0),
            "planned_seconds": round_digits(run.planned_seconds or 0.0),
            "error_percent": error,
        }
        for run, error in errors[-HISTORY_LENGTH:]
    ]
    return {
        "own_runs": len(errors),
        "own_mean_error_percent": round(sum(absolute) / len(absolute), 1),
        "own_median_error_percent": absolute[len(absolute) // 2],
        "own_latest": latest,
    }


def _find_error(anchor: Anchor, planned: float | None) -> float | None:
    """Return by how many percent a planned step is longer than the run's; None without a time."""
    measured = anchor.measured_seconds
    return round(100 * (planned / measured - 1), 1) if measured and planned else None


def describe_price(option: Option, settings: Price) -> str:
    """Return the machines' hourly price, with source and date."""
    machine = option.plan.machine
    if machine.usd_per_hour is None:
        suffix = "" if machine.name == LOCAL else f": no price in {settings.region}"
        return f"unknown{suffix}; set execution.price.usd_per_hour"
    if machine.name == LOCAL:
        return f"{machine.usd_per_hour:g} USD per hour (run file)"
    listed = find_listed_price(find_instance(machine.name), settings.discounts, settings.region)
    is_listed = listed is not None and listed.usd_per_hour == machine.usd_per_hour
    source = f"{listed.source}, {listed.as_of}" if listed and is_listed else "run file"
    total = machine.usd_per_hour * option.plan.count
    return f"{total:.2f} USD per hour ({option.plan.count} x {machine.usd_per_hour:g}, {source})"


def list_price_warnings(
    prices: Iterable[tuple[str, float | None]], settings: Price, today: dt.date
) -> list[str]:
    """Return a warning about old catalog prices; empty if all prices are recent.

    `prices`: machine types, and their dollars per hour. Run file prices do not have a date.
    """
    stale: dict[str, str] = {}
    for name, usd_per_hour in prices:
        if name == LOCAL:
            continue
        price = find_listed_price(find_instance(name), settings.discounts, settings.region)
        is_listed = price is not None and price.usd_per_hour == usd_per_hour
        if price is not None and is_listed and price.staleness_warning(today):
            stale[name] = f"{name} of {price.as_of}"
    if not stale:
        return []
    names = ", ".join(stale.values())
    return [f"prices older than {STALE_DAYS} days: {names}; run: regauge catalog refresh"]
