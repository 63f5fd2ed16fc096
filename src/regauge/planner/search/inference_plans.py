"""Plans for an artifact in the verb `plan`: a server, or batch inference."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

from regauge import config
from regauge.config import Settings
from regauge.inference.export.artifact import open_unchecked
from regauge.inference.export.bucket_times import read_bucket_times
from regauge.machines.settings import Price
from regauge.planner import inference_plan, intervals
from regauge.planner.inference_plan import InferenceOption, InferenceRequest
from regauge.planner.run_plans.plan_document import (
    describe_estimate,
    list_price_warnings,
    round_digits,
)
from regauge.planner.run_plans.prepared_data import read_histogram
from regauge.planner.search.select_machines import expand_chips
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from regauge.planner.search.plan_options import Machines, Purpose

DEFAULT_SLO_MS = 1000.0
MAX_LISTED = 10


class PricedExecution(Settings):
    """The `execution` keys used in an artifact's plan."""

    price: Price = Price()
    """Machine region, discounts or price."""


class PricedRun(Settings):
    """The run file tables used in an artifact's plan."""

    execution: PricedExecution = PricedExecution()
    """The price."""


def plan_inference(
    folder: Path, machines: Machines, purpose: Purpose, price: Price
) -> dict[str, Any]:
    """Return machines for an artifact, ranked by dollars, with buckets and replicas.

    Raises SettingsError for options that contradict each other, and if nothing meets the limits.
    """
    _check_purpose(machines, purpose)
    request, notes = read_artifact(folder, purpose.lengths, price)
    text = machines.on or machines.compare or ""
    names = expand_chips(text) if text else []
    answer: dict[str, Any] = {
        "measured_on": f"{request.chip}, {request.threads} threads",
        "buckets": [f"{rows} x {length}" for length, rows in request.shapes],
    }
    if purpose.serve is not None:
        limit = purpose.slo_ms or DEFAULT_SLO_MS
        options = inference_plan.plan_serving(request, purpose.serve, limit, names)
        answer |= {"requests_per_second": purpose.serve, "slo_ms": limit}
        if purpose.slo_ms is None:
            notes.append(f"--slo-ms is not set: {limit:g} ms is assumed")
    else:
        options = inference_plan.plan_prediction(request, purpose.predict or 0, names)
        answer["rows"] = purpose.predict
    listed = options if machines.show_all else options[:MAX_LISTED]
    answer |= {"options": _rank(listed), "more_options": len(options) - len(listed)}
    if not all(option.is_measured for option in listed):
        notes.append("times of a chip that is not the measured one follow from its data sheet")
    prices = [(option.instance.name, option.usd_per_hour) for option in listed]
    today = dt.datetime.now(dt.UTC).date()
    return answer | {"notes": notes, "warnings": list_price_warnings(prices, price, today)}


def read_price(overrides: tuple[str, ...], stage: str | None) -> Price:
    """Return the `execution.price` overrides; raises SettingsError for other keys."""
    if stage is not None:
        raise SettingsError("--stage has no effect on the plan of an artifact", "remove it")
    tables = config.apply_overrides({}, overrides, PricedRun)
    for name in tables:
        if name not in PricedRun.model_fields:
            problem = f"'{name}' has no effect on the plan of an artifact"
            raise SettingsError(problem, "set nothing but execution.price")
    return config.build(PricedRun, tables, (), "the plan of an artifact").execution.price


def _check_purpose(machines: Machines, purpose: Purpose) -> None:
    """Raise SettingsError for options that exclude each other or are out of range."""
    if purpose.serve is not None and purpose.predict is not None:
        raise SettingsError("--serve and --predict contradict each other", "use one of them")
    if machines.probe:
        raise SettingsError("--probe measures training steps", "remove --serve and --predict")
    if purpose.to_target is not None:
        raise SettingsError("--to-target is a training plan", "remove --serve and --predict")
    if machines.deadline is not None or (machines.on and machines.compare):
        option = "--deadline" if machines.deadline else "--compare"
        raise SettingsError(f"{option} has no effect on this plan", "remove it")
    for name in ("serve", "predict", "slo_ms"):
        value = getattr(purpose, name)
        if value is not None and value <= 0:
            option = f"--{name.replace('_', '-')}"
            raise SettingsError(f"{option} {value:g} is not positive", "use a positive number")
    if purpose.slo_ms is not None and purpose.serve is None:
        raise SettingsError("--slo-ms has no effect on --predict", "remove it")


def read_artifact(
    folder: Path, lengths: Path | None, price: Price
) -> tuple[InferenceRequest, list[str]]:
    """Return an artifact with measured times and text lengths, and notes.

    Without a dataset, every text has the longest measured length. Raises SettingsError if the
    artifact lacks measured times.
    """
    times = read_bucket_times(open_unchecked(folder))
    if times is None:
        raise SettingsError(f"{folder} has no measured times", "export the artifact again")
    shapes = tuple(sorted({(item.length, item.rows) for item in times.times}))
    notes = []
    if lengths is None:
        longest = shapes[-1][0]
        histogram: Sequence[int] = [*[0] * longest, 1]
        notes.append(f"every text is planned with {longest} tokens: name a dataset with --lengths")
    else:
        histogram = read_histogram(lengths)
    request = InferenceRequest(times, shapes, times.chip, times.threads, tuple(histogram), price)
    return request, notes


def _rank(options: Sequence[InferenceOption]) -> list[dict[str, Any]]:
    """Return table rows; options whose costs overlap with the first in a group are ties."""
    rows: list[dict[str, Any]] = []
    first: InferenceOption | None = None
    for option in options:
        if first is None or not _is_tie(first, option):
            first, rank = option, len(rows) + 1
        rows.append({"rank": rank} | _describe(option))
    return rows


def _is_tie(first: InferenceOption, second: InferenceOption) -> bool:
    return intervals.overlaps(first.usd_per_million, second.usd_per_million)


def _describe(option: InferenceOption) -> dict[str, Any]:
    row: dict[str, Any] = {
        "machines": f"{option.count} x {option.instance.name}",
        "replicas": option.replicas,
        "batch_rows": option.rows,
    }
    if option.latency_ms is not None:
        row["latency_ms"] = round_digits(option.latency_ms, 3)
    estimates = {
        "rows_per_second": option.rows_per_second,
        "usd_per_million": option.usd_per_million,
        "hours": option.hours,
        "usd": option.usd,
    }
    for name, estimate in estimates.items():
        if (values := describe_estimate(estimate)) is not None:
            row |= {name: values["p50"], f"{name}_p10": values["p10"], f"{name}_p90": values["p90"]}
    return row | {"measured": option.is_measured}
