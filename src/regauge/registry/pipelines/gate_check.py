"""Compares a new model's metrics with the serving model's, within bands."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import config
from regauge.config.output_files import EVALUATION
from regauge.system import choices
from regauge.system.errors import InconclusiveError, SettingsError
from regauge.system.json_files import DocumentShape
from regauge.tasks import lower_is_better

if TYPE_CHECKING:
    from regauge.registry.pipelines.settings import GateOptions, MetricBand

GATE = "gate.json"
"""Gate record in the output folder."""
ROUNDING = 1e-9
"""Relative difference explained by floating-point arithmetic."""
REPEAT = "run 'regauge evaluate' again"


class Identity(DocumentShape):
    """Identifies an evaluation's held-out rows."""

    data_fingerprint: str
    heldout_rows: int | None = None


class EvaluationSettingsShape(DocumentShape):
    """Evaluation settings read by the gate."""

    models: dict[str, str]


class EvaluatedModels(DocumentShape):
    """Evaluation keys read by the gate."""

    rows: list[dict[str, Any]]
    identity: Identity
    settings: EvaluationSettingsShape


class GateRecord(DocumentShape):
    """Gate record keys read by a promotion."""

    passed: bool
    serving_version: int | str | None = None
    metrics: list[dict[str, Any]]


@dataclass(frozen=True)
class GatedMetric:
    """One metric of the new model, with the limit."""

    name: str
    new: float
    serving: float | None
    """The serving model's value; None if the metric is not compared."""
    limit: float | None
    """Worst permitted value; None without a model to compare with."""
    band: str
    """The limit's rule as text."""
    passed: bool

    def describe_failure(self) -> str:
        """Return the failure as text: the metric, both values and the band."""
        side = "above" if lower_is_better(self.name) else "below"
        against = "" if self.serving is None else f" (serving model: {self.serving:.6g})"
        return f"{self.name} is {self.new:.6g}, {side} {self.limit:.6g}{against}, band: {self.band}"


def check_metrics(options: GateOptions) -> list[GatedMetric]:
    """Return every gate metric with its result.

    If the evaluation does not contain a serving model, only fixed limits count. Raises
    SettingsError for an unknown metric, and InconclusiveError if the two evaluations' held-out rows
    differ.
    """
    new_table = read_evaluation(options.evaluation)
    serving_table = read_serving_table(options)
    new_hash, serving_hash = (
        table["identity"]["data_fingerprint"] for table in (new_table, serving_table)
    )
    if new_hash != serving_hash:
        problem = f"the held-out sets differ: {new_hash[:12]} and {serving_hash[:12]}"
        raise InconclusiveError(problem, "evaluate both models on the same dataset")
    new_row = _find_row(new_table, options.new)
    if new_row is None:
        names = [str(row.get("name")) for row in new_table["rows"]]
        problem = f"{options.evaluation} has no model '{options.new}'"
        raise SettingsError(problem, f"set gate.new to one of: {', '.join(names)}")
    serving_row = _find_row(serving_table, options.serving)
    num_rows = new_table["identity"].get("heldout_rows")
    gated = []
    for name, band in options.metrics.items():
        new = _read_metric(new_row, name)
        serving = None if serving_row is None else _read_metric(serving_row, name)
        gated += _apply_band(name, band, (new, serving), num_rows)
    return gated


def read_serving_table(options: GateOptions) -> dict[str, Any]:
    """Return the evaluation with the serving model."""
    return read_evaluation(options.serving_evaluation or options.evaluation)


def read_evaluation(folder: str) -> dict[str, Any]:
    """Return an evaluation document; raises DataError if it is missing or damaged."""
    path = Path(folder) / EVALUATION
    document = config.find_document(path, REPEAT, EvaluatedModels)
    if document is None:
        raise SettingsError(f"{path} is missing", "name the output folder of 'regauge evaluate'")
    return document


def dump_metrics(metrics: list[GatedMetric]) -> list[dict[str, Any]]:
    """Return metrics as table rows; infinite values and NaN become text."""
    return [
        {
            key: str(value) if isinstance(value, float) and not isfinite(value) else value
            for key, value in asdict(metric).items()
        }
        for metric in metrics
    ]


def _apply_band(
    name: str, band: MetricBand, values: tuple[float, float | None], num_rows: int | None
) -> list[GatedMetric]:
    new, serving = values
    results = []
    if band.compares:
        limit, text = None, "no serving model"
        if serving is not None:
            loss, text = _compute_loss(name, band, (new, serving), num_rows)
            limit = serving + loss if lower_is_better(name) else serving - loss
        passed = limit is None or _is_within(name, new, limit)
        results.append(GatedMetric(name, new, serving, limit, text, passed))
    if band.min_value is not None:
        passed = new >= band.min_value
        text = f"at least {band.min_value:g}"
        results.append(GatedMetric(name, new, None, band.min_value, text, passed))
    if band.max_value is not None:
        passed = new <= band.max_value
        text = f"at most {band.max_value:g}"
        results.append(GatedMetric(name, new, None, band.max_value, text, passed))
    return results


def _compute_loss(
    name: str, band: MetricBand, values: tuple[float, float], num_rows: int | None
) -> tuple[float, str]:
    """Return the largest permitted loss, and the rule as text.

    The wider of the absolute and the relative limit counts; the noise is added to it.
    """
    limits, texts = [0.0], []
    if band.max_loss is not None:
        limits.append(band.max_loss)
        texts.append(f"{band.max_loss:g}")
    if band.max_relative_loss is not None:
        limits.append(band.max_relative_loss * abs(values[1]))
        texts.append(f"{band.max_relative_loss:.3g} of the serving value")
    loss = max(limits)
    if band.sigmas is not None:
        noise = band.sigmas * _bound_standard_error(name, values, num_rows)
        loss += noise
        texts.append(f"{band.sigmas:g} standard errors ({noise:.3g})")
    return loss, " and ".join(texts)


def _bound_standard_error(name: str, values: tuple[float, float], num_rows: int | None) -> float:
    """Return an upper bound for the standard error of a difference between two means from 0 to 1.

    The variance of values from 0 to 1 with mean p is at most p (1 - p) (Bhatia and Davis, 2000).
    Raises SettingsError for other metrics, and if the row count is unknown.
    """
    if num_rows is None or not all(0 <= value <= 1 for value in values):
        problem = f"gate.metrics.{name}.sigmas needs a metric from 0 to 1 and its number of rows"
        raise SettingsError(problem, "set max_loss or max_relative_loss instead")
    return sqrt(sum(value * (1 - value) for value in values) / max(num_rows, 1))


def _is_within(name: str, new: float, limit: float) -> bool:
    """Return whether a value is at least as good as a limit; NaN is not."""
    tolerance = ROUNDING * abs(limit)
    return new <= limit + tolerance if lower_is_better(name) else new >= limit - tolerance


def _find_row(table: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((row for row in table["rows"] if row.get("name") == name), None)


def _read_metric(row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    metrics = [key for key, item in row.items() if isinstance(item, int | float)]
    problem = f"the evaluation of '{row['name']}' has no metric '{name}'"
    raise SettingsError(problem, choices.did_you_mean(name, metrics))
