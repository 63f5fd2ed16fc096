"""Compares a new model's metrics with the serving model's, within bands."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, isfinite, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import config
from regauge.config.output_files import EVALUATION
from regauge.system import choices
from regauge.system.errors import InconclusiveError, SettingsError
from regauge.system.json_files import DocumentShape
from regauge.tasks import Direction, find_direction

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
    directions: dict[str, Direction] = {}
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
    """Worst permitted value; None without a model to compare with, or for a non-finite value."""
    band: str
    """The limit's rule as text."""
    passed: bool
    undecided: bool = False
    """Whether more evaluation rows could pass the model."""

    def describe_failure(self) -> str:
        """Return the failure as text: the metric, both values and the band."""
        if self.limit is None:
            return f"{self.name} is {self.new}, not {self.band}"
        side = "above" if self.new > self.limit else "below"
        if self.undecided:
            side = "against a limit of"
        against = "" if self.serving is None else f" (serving model: {self.serving:.6g})"
        return f"{self.name} is {self.new:.6g}, {side} {self.limit:.6g}{against}, band: {self.band}"


def check_metrics(options: GateOptions) -> list[GatedMetric]:
    """Return every gate metric with its result.

    If the evaluation does not contain a serving model, only fixed limits count. Raises
    SettingsError for an unknown metric, or one without a direction, and InconclusiveError if the
    two evaluations' held-out rows differ.
    """
    new_table = read_evaluation(options.evaluation)
    serving_table = read_serving_table(options)
    new_set, serving_set = (
        f"{table['identity'].get('heldout_rows')} rows of {table['identity']['data_fingerprint']}"
        for table in (new_table, serving_table)
    )
    if new_set != serving_set:
        problem = f"the held-out sets differ: {new_set} and {serving_set}"
        raise InconclusiveError(problem, "evaluate both models on the same rows")
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
        declared = new_table.get("directions", {})
        direction = band.direction or find_direction(name, declared)
        gated += _apply_band(name, band, direction, (new, serving), num_rows)
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


def _apply_band(
    name: str,
    band: MetricBand,
    direction: Direction | None,
    values: tuple[float, float | None],
    num_rows: int | None,
) -> list[GatedMetric]:
    new, serving = values
    if not isfinite(new):
        return [GatedMetric(name, new, serving, None, "a finite number", passed=False)]
    results = []
    if band.compares and (serving is None or not isfinite(serving)):
        text = "no serving model" if serving is None else "a serving value that is not finite"
        results.append(GatedMetric(name, new, serving, None, text, passed=True))
    elif band.compares and serving is not None:
        if direction is None:
            problem = f"the evaluation does not declare whether a low or a high '{name}' is better"
            raise SettingsError(problem, f'set gate.metrics.\'{name}\'.direction to "min" or "max"')
        results.append(_compare(name, band, direction, (new, serving), num_rows))
    if band.min_value is not None:
        passed = new >= band.min_value
        text = f"at least {band.min_value:g}"
        results.append(GatedMetric(name, new, None, band.min_value, text, passed))
    if band.max_value is not None:
        passed = new <= band.max_value
        text = f"at most {band.max_value:g}"
        results.append(GatedMetric(name, new, None, band.max_value, text, passed))
    return results


def _compare(
    name: str,
    band: MetricBand,
    direction: Direction,
    values: tuple[float, float],
    num_rows: int | None,
) -> GatedMetric:
    """Compare the new model's gain, or with `sigmas` the bounds of the gain, with the band.

    The wider of the absolute and the relative limit counts. A model passes if the lower bound is
    within the band. If only the upper one is, the rows are too few to decide.
    """
    new, serving = values
    losses, texts = [0.0], []
    if band.max_loss is not None:
        losses.append(band.max_loss)
        texts.append(f"{band.max_loss:g}")
    if band.max_relative_loss is not None:
        losses.append(band.max_relative_loss * abs(serving))
        texts.append(f"{band.max_relative_loss:.3g} of the serving value")
    loss = max(losses)
    limit = serving + loss if direction == "min" else serving - loss
    lower = upper = serving - new if direction == "min" else new - serving
    if band.sigmas is not None:
        better, worse = (serving, new) if direction == "min" else (new, serving)
        lower, upper = _bound_difference(name, (better, worse), num_rows, band.sigmas)
        bounds = f"the gain is from {lower:.3g} to {upper:.3g} ({band.sigmas:g} standard errors"
        texts.append(f"{bounds}, {num_rows} rows)")
    tolerance = ROUNDING * abs(limit)
    passed = lower >= -loss - tolerance
    undecided = not passed and band.sigmas is not None and upper >= -loss - tolerance
    return GatedMetric(name, new, serving, limit, " and ".join(texts), passed, undecided)


def _bound_difference(
    name: str, values: tuple[float, float], num_rows: int | None, sigmas: float
) -> tuple[float, float]:
    """Return the bounds of a difference between two means of values from 0 to 1.

    They are the hybrid score bounds for proportions (Newcombe, 1998, method 10). Other values vary
    less (Bhatia and Davis, 2000), and so do differences of two models on the same rows. Raises
    SettingsError for other metrics, and if the row count is unknown.
    """
    if not num_rows or not all(0 <= value <= 1 for value in values):
        problem = f"gate.metrics.{name}.sigmas needs a metric from 0 to 1 and its number of rows"
        raise SettingsError(problem, "set max_loss or max_relative_loss instead")
    first, second = values
    low, high = _bound_proportion(first, num_rows, sigmas)
    other_low, other_high = _bound_proportion(second, num_rows, sigmas)
    difference = first - second
    lower = difference - hypot(first - low, other_high - second)
    return lower, difference + hypot(high - first, second - other_low)


def _bound_proportion(value: float, num_rows: int, sigmas: float) -> tuple[float, float]:
    """Return the score bounds of a proportion (Wilson, 1927)."""
    scale = sigmas**2 / num_rows
    half_width = sqrt(scale * (value * (1 - value) + scale / 4))
    center, width = value + scale / 2, 1 + scale
    return (center - half_width) / width, (center + half_width) / width


def _find_row(table: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((row for row in table["rows"] if row.get("name") == name), None)


def _read_metric(row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    metrics = [key for key, item in row.items() if isinstance(item, int | float)]
    problem = f"the evaluation of '{row['name']}' has no metric '{name}'"
    raise SettingsError(problem, choices.did_you_mean(name, metrics))
