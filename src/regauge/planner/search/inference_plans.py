"""Inference plans in the verb `plan`, for an artifact or a model: a server, or batch inference."""

from __future__ import annotations

import datetime as dt
import math
from typing import TYPE_CHECKING, Any

from regauge import config
from regauge.config import Settings
from regauge.inference.export.artifact import open_unchecked
from regauge.inference.export.bucket_times import read_bucket_times
from regauge.inference.export.manifest import MANIFEST
from regauge.machines.settings import Price
from regauge.planner import inference_plan, intervals
from regauge.planner.inference_plan import ArtifactRequest, InferenceOption, ModelRequest
from regauge.planner.model_shape import shape_from_config
from regauge.planner.run_plans.plan_document import (
    describe_estimate,
    list_price_warnings,
)
from regauge.planner.run_plans.prepared_data import read_histogram
from regauge.planner.search.plan_options import name_option, refuse_options
from regauge.planner.search.select_machines import expand_chips
from regauge.system.errors import DataError, SettingsError
from regauge.system.hub import CONFIG, final_model_dir, resolve_model
from regauge.system.json_files import read_json
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from regauge.planner.search.plan_options import Machines, Purpose

DEFAULT_SLO_MS, LONG_SLO_MS = 1000.0, 60_000.0
"""Milliseconds allowed per request if none are set: for one pass, and for generation."""
DEFAULT_TOKENS = 512
MAX_ROWS = 512
MAX_LISTED = 10
ROOFLINE_NOTE = "no measurement of the model: its times follow from its products and memory traffic"


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
    """Return machines for an artifact or a model, ranked by dollars, with batches and replicas.

    Raises SettingsError for options that contradict each other, and if nothing meets the limits.
    """
    _check_purpose(machines, purpose)
    request: ArtifactRequest | ModelRequest
    if (final_model_dir(str(folder)) / CONFIG).is_file() and not (folder / MANIFEST).is_file():
        request, notes = read_model(folder, purpose, price)
        shape = request.shape
        answer: dict[str, Any] = {
            "model": f"{shape.family}, {format_count(request.num_parameters, 'parameter')}",
            "tokens": f"{len(request.histogram) - 1} per text at most",
            "new_tokens": request.new_tokens,
        }
    else:
        problem = "has no effect on the plan of an artifact"
        remedy = "remove it, or name a model folder"
        refuse_options(purpose, ("tokens", "new_tokens"), problem, remedy)
        request, notes = read_artifact(folder, purpose.lengths, price)
        answer = {
            "measured_on": f"{request.chip}, {request.threads} threads",
            "buckets": [f"{rows} x {length}" for length, rows in request.shapes],
        }
    text = machines.on or machines.compare or ""
    names = expand_chips(text) if text else []
    if purpose.serve is not None:
        limit = purpose.slo_ms or (DEFAULT_SLO_MS if not purpose.new_tokens else LONG_SLO_MS)
        options = inference_plan.plan_serving(request, purpose.serve, limit, names)
        answer |= {"requests_per_second": purpose.serve, "slo_ms": limit}
        if purpose.slo_ms is None:
            notes.append(f"--slo-ms is not set: {limit:g} ms is assumed")
    else:
        options = inference_plan.plan_prediction(request, purpose.predict, names)
        answer["rows"] = purpose.predict
    listed = options if machines.show_all else options[:MAX_LISTED]
    tokens = 0.0
    if isinstance(request, ModelRequest):
        tokens = request.new_tokens or inference_plan.find_mean_length(request.histogram)
    answer |= {"options": _rank(listed, tokens), "more_options": len(options) - len(listed)}
    if not tokens and not all(option.is_measured for option in listed):
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
    for name in ("serve", "predict", "slo_ms", "tokens", "new_tokens"):
        value = getattr(purpose, name)
        if value is not None and value <= 0:
            problem = f"{name_option(name)} {value:g} is not positive"
            raise SettingsError(problem, "use a positive number")
    if purpose.tokens is not None and purpose.lengths is not None:
        raise SettingsError("--tokens and --lengths contradict each other", "use one of them")
    if purpose.slo_ms is not None and purpose.serve is None:
        raise SettingsError("--slo-ms has no effect on --predict", "remove it")


def read_artifact(
    folder: Path, lengths: Path | None, price: Price
) -> tuple[ArtifactRequest, list[str]]:
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
    request = ArtifactRequest(
        shapes, tuple(histogram), times, times.chip, times.threads, price=price
    )
    return request, notes


def read_model(folder: Path, purpose: Purpose, price: Price) -> tuple[ModelRequest, list[str]]:
    """Return a model folder's request, with one length or a dataset's lengths, and notes.

    Raises SettingsError for a model type that the planner does not know, for too many tokens, and
    for an encoder that would generate tokens.
    """
    folder = resolve_model(str(folder), fetch=False)
    config = read_json(folder / CONFIG, "copy the folder again")
    try:
        shape = shape_from_config(config)
    except DataError as error:
        raise SettingsError(error.problem, error.remedy) from None
    new_tokens = purpose.new_tokens or 0
    if new_tokens and not shape.attention.is_causal:
        raise SettingsError(f"a {shape.family} encodes texts", "remove --new-tokens")
    limit = config.get("max_position_embeddings") or config.get("n_positions") or math.inf
    tokens = purpose.tokens or min(DEFAULT_TOKENS, limit)
    histogram = (
        [*[0] * int(tokens), 1] if purpose.lengths is None else read_histogram(purpose.lengths)
    )
    longest = len(histogram) - 1 + new_tokens
    if longest > limit:
        raise SettingsError(f"{longest} tokens are more than the model's {limit}", "plan fewer")
    notes = [ROOFLINE_NOTE]
    if purpose.lengths is None and purpose.tokens is None:
        notes.append(f"every text is planned with {tokens} tokens: set --tokens or --lengths")
    if shape.attention.is_causal and not new_tokens:
        notes.append("the plan is for one pass over each text: set --new-tokens to generate")
    lengths = sorted({*inference_plan.list_powers(len(histogram) - 2), len(histogram) - 1})
    shapes = tuple(
        (size, rows) for size in lengths for rows in inference_plan.list_powers(MAX_ROWS)
    )
    return ModelRequest(shapes, tuple(histogram), shape, new_tokens, price=price), notes


def _rank(options: Sequence[InferenceOption], tokens: float) -> list[dict[str, Any]]:
    """Return table rows; options whose costs overlap with the first in a group are ties."""
    rows: list[dict[str, Any]] = []
    first: InferenceOption | None = None
    for option in options:
        if first is None or not _is_tie(first, option):
            first, rank = option, len(rows) + 1
        rows.append({"rank": rank} | _describe(option, tokens))
    return rows


def _is_tie(first: InferenceOption, second: InferenceOption) -> bool:
    return intervals.overlaps(first.usd_per_million, second.usd_per_million)


def _describe(option: InferenceOption, tokens: float) -> dict[str, Any]:
    """Return a table row; `tokens` per text are counted if known."""
    row: dict[str, Any] = {
        "machines": f"{option.count} x {option.instance.name}",
        "replicas": option.replicas,
        "batch_rows": option.rows,
    }
    estimates = {"latency_ms": option.latency_ms, "rows_per_second": option.rows_per_second}
    if tokens:
        estimates["tokens_per_second"] = option.rows_per_second.scale(tokens)
        estimates["usd_per_million_tokens"] = option.usd_per_million.scale(1 / tokens)
    estimates |= {
        "usd_per_million": option.usd_per_million,
        "hours": option.hours,
        "usd": option.usd,
    }
    for name, estimate in estimates.items():
        if (values := describe_estimate(estimate)) is not None:
            row |= {name: values["p50"], f"{name}_p10": values["p10"], f"{name}_p90": values["p90"]}
    return row if tokens else row | {"measured": option.is_measured}
