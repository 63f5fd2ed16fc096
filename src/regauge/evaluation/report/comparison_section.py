"""Report sections comparing runs with the baseline: rows, and charts of all runs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.evaluation.compare import sentences
from regauge.evaluation.compare.cost import interpolate, rank_by_cost
from regauge.evaluation.compare.gaps import value_at
from regauge.evaluation.compare.verdict import heldout_metrics
from regauge.evaluation.report.charts import (
    AxisScale,
    Band,
    Bar,
    Chart,
    Curve,
    ReferenceLine,
    chart_bars,
    chart_curves,
    chart_scaling,
)
from regauge.evaluation.report.run_section import chart_memory
from regauge.monitoring.trackers import TRAIN_LOSS
from regauge.run_folders import formatting
from regauge.run_folders.series import smooth

if TYPE_CHECKING:
    from regauge.evaluation.compare.compare import ComparisonResult, DivergenceSummary
    from regauge.evaluation.compare.cost import CostToTarget
    from regauge.evaluation.compare.gaps import Gap, MetricComparison
    from regauge.evaluation.compare.verdict import Parity
    from regauge.run_folders.run_folder import RunFolder
    from regauge.run_folders.series import Series

LIMIT_NOTE = (
    "The allowed difference is the largest of the tolerance, the run-to-run noise and, for a "
    "metric that counts items, the change by six items (sign test, p = 3%)."
)
Row = dict[str, str | bool]
MAX_EVALUATIONS = 12
"""Maximum number of evaluations in the table; those with the largest differences are kept."""
MAX_METRICS = 4
"""Maximum held-out metrics drawn."""
MIN_DIFFERENCE = 1e-9
"""Smallest difference drawn, because a logarithmic axis does not have a zero."""
SPEED = "train/tokens_per_second"
NOISE_LABEL = "run-to-run noise"
DIFFERENCES = AxisScale(y="relative difference", logarithmic=True)


@dataclass(frozen=True)
class ComparisonSection:
    """Formatted comparison of one run with the baseline."""

    baseline: str
    candidate: str
    verdict: str
    sentences: tuple[str, ...]
    rows: tuple[Row, ...]
    """Metric, step, both values, difference and limit for each evaluation."""
    num_omitted: int
    """Evaluations with smaller differences, omitted from the rows."""
    setting_differences: tuple[tuple[str, str, str], ...]
    """(key, baseline value, candidate value) of differing settings."""
    divergence: DivergenceSummary | None
    """First divergence in a recomputed step; None if no step was recomputed."""


@dataclass(frozen=True)
class RunComparison:
    """Formatted comparison of runs with the first one."""

    names: tuple[str, ...]
    summary: tuple[str, ...]
    """The verdict on each compared run, and the cheapest run."""
    sections: tuple[ComparisonSection, ...]
    """One section per run compared with the baseline."""
    cost_rows: tuple[Row, ...]
    """Cost of each run up to the target; empty without a target."""
    cost_sentences: tuple[str, ...]
    charts: tuple[Chart, ...]


def build_run_comparison(comparison: ComparisonResult) -> RunComparison:
    divergences = {divergence.run: divergence for divergence in comparison.divergences}
    verdicts = [sentences.describe_parity(parity)[0] for parity in comparison.parities]
    ranking = rank_by_cost(comparison.costs)
    cheapest = ranking[0].run if len(ranking) > 1 else None
    return RunComparison(
        names=tuple(run.name for run in comparison.runs),
        summary=(*verdicts, *sentences.describe_cheapest(comparison)),
        sections=tuple(
            _build_section(parity, divergences.get(parity.candidate))
            for parity in comparison.parities
        ),
        cost_rows=tuple(_build_cost_row(cost, cheapest) for cost in comparison.costs),
        cost_sentences=sentences.describe_costs(comparison),
        charts=tuple(_build_charts(comparison)),
    )


def _build_section(parity: Parity, divergence: DivergenceSummary | None) -> ComparisonSection:
    rows = [(metric, gap) for metric in parity.metrics for gap in metric.gaps]
    rows.sort(key=lambda row: -row[1].difference)
    shown = sorted(rows[:MAX_EVALUATIONS], key=lambda row: (row[0].name, row[1].step))
    differences = (*parity.blocking_differences, *parity.compute_differences)
    return ComparisonSection(
        baseline=parity.baseline,
        candidate=parity.candidate,
        verdict=parity.verdict,
        sentences=sentences.describe_parity(parity),
        rows=tuple(_build_row(*row) for row in shown),
        num_omitted=len(rows) - len(shown),
        setting_differences=tuple(
            (
                item.key,
                sentences.format_setting(item.baseline),
                sentences.format_setting(item.candidate),
            )
            for item in differences
        ),
        divergence=divergence,
    )


def _build_row(metric: MetricComparison, gap: Gap) -> Row:
    limit = metric.limit(gap)
    return {
        "metric": metric.name,
        "step": f"{gap.step:,}",
        "baseline": f"{gap.baseline:.5g}",
        "candidate": f"{gap.candidate:.5g}",
        "difference": sentences.format_difference(gap.difference),
        "limit": sentences.format_difference(limit),
        "is_within_limit": gap.difference <= limit,
    }


def _build_cost_row(cost: CostToTarget, cheapest: str | None) -> Row:
    joules = cost.max_joules
    return {
        "run": cost.run,
        "step": "not reached" if cost.step is None else f"{cost.step:,.4g}",
        "machine_time": formatting.duration(cost.machine_seconds),
        "device_time": formatting.duration(cost.device_seconds),
        "usd": formatting.dollars(cost.usd),
        "energy": formatting.UNKNOWN if joules is None else f"at most {formatting.count(joules)}J",
        "price": formatting.UNKNOWN if cost.price is None else cost.price.description,
        "is_cheapest": cost.run == cheapest,
    }


def _build_charts(comparison: ComparisonResult) -> list[Chart]:
    return [
        *(
            chart
            for metric in _select_metrics(comparison)
            for chart in _chart_metric(comparison, metric)
        ),
        *chart_curves("Training loss, smoothed", _loss_curves(comparison)),
        *_chart_loss_differences(comparison),
        *_chart_metric_by_cost(comparison),
        *_chart_speed(comparison),
        *_chart_scaling(comparison),
        *chart_memory(comparison.runs),
    ]


def _select_metrics(comparison: ComparisonResult) -> list[MetricComparison]:
    by_name = {metric.name: metric for parity in comparison.parities for metric in parity.metrics}
    return list(by_name.values())[:MAX_METRICS]


def _chart_metric(comparison: ComparisonResult, metric: MetricComparison) -> list[Chart]:
    curves = [
        Curve(run.name, heldout_metrics(run).get(metric.name, ()), "points")
        for run in comparison.runs
    ]
    baseline = heldout_metrics(comparison.runs[0])[metric.name]
    label = f"± {sentences.format_difference(metric.tolerance)}"
    references = [_build_band(label, baseline, ((0, metric.tolerance),))]
    if metric.noise:
        references.append(_build_band(NOISE_LABEL, baseline, metric.noise, hatched=True))
    return chart_curves(metric.name, curves, references=tuple(references))


def _build_band(label: str, baseline: Series, widths: Series, *, hatched: bool = False) -> Band:
    lower = tuple((step, value - abs(value) * value_at(widths, step)) for step, value in baseline)
    upper = tuple((step, value + abs(value) * value_at(widths, step)) for step, value in baseline)
    return Band(label, lower, upper, hatched)


def _loss_curves(comparison: ComparisonResult) -> list[Curve]:
    return [
        Curve(run.name, smooth(run.series.get(TRAIN_LOSS, ())), "mean") for run in comparison.runs
    ]


def _chart_loss_differences(comparison: ComparisonResult) -> list[Chart]:
    curves = []
    for parity in comparison.parities:
        points = tuple((gap.step, max(gap.difference, MIN_DIFFERENCE)) for gap in parity.loss_gaps)
        curves.append(Curve(parity.candidate, points, "mean"))
    if comparison.noise_runs and comparison.parities:
        floor = tuple(
            (step, max(difference, MIN_DIFFERENCE))
            for step, difference in comparison.parities[0].noise_floor
        )
        curves.append(Curve(NOISE_LABEL, floor, "raw"))
    label = f"tolerance, {sentences.format_difference(comparison.tolerance)}"
    tolerance = ReferenceLine(label, comparison.tolerance)
    title = "Training loss: difference from the baseline"
    return chart_curves(title, curves, DIFFERENCES, (tolerance,))


def _chart_metric_by_cost(comparison: ComparisonResult) -> list[Chart]:
    """Return the target metric's chart against dollars, or machine time without all prices."""
    if comparison.target is None:
        return []
    metric, is_priced = comparison.target.metric, all(cost.price for cost in comparison.costs)
    curves = []
    for run, cost in zip(comparison.runs, comparison.costs, strict=True):
        factor = cost.price.usd_per_second if is_priced and cost.price else 1.0
        seconds = run.cost_series.get("machine_seconds", ())
        points = [(interpolate(seconds, step), value) for step, value in run.series.get(metric, ())]
        known = tuple((until * factor, value) for until, value in points if until is not None)
        curves.append(Curve(run.name, known, "points"))
    target = ReferenceLine("target", comparison.target.threshold)
    x = "dollars" if is_priced else "seconds of machine time"
    return chart_curves(f"{metric} against {x}", curves, AxisScale(x=x), (target,))


def _chart_speed(comparison: ComparisonResult) -> list[Chart]:
    bars = []
    for run in comparison.runs:
        speed, padding = _find_speed(run), run.ledger.get("padding_fraction")
        if speed is None or padding is None or padding >= 1:
            continue
        total = speed / (1 - padding)
        bars.append(Bar(run.name, (("real tokens", speed), ("padding", total - speed))))
    return chart_bars("Tokens per second, padding included", bars, " tokens/s")


def _chart_scaling(comparison: ComparisonResult) -> list[Chart]:
    speeds: dict[int, float] = {}
    for run in comparison.runs:
        speed = _find_speed(run)
        if run.num_devices is not None and speed is not None:
            speeds[run.num_devices] = max(speed, speeds.get(run.num_devices, 0.0))
    if len(speeds) < 2:  # noqa: PLR2004  (a line)
        return []
    measured = tuple(sorted(speeds.items()))
    return chart_scaling("Real tokens per second", measured, AxisScale(x="device"))


def _find_speed(run: RunFolder) -> float | None:
    """Return the median tokens per second, because a run's first intervals are slower."""
    values = [value for _, value in run.series.get(SPEED, ())]
    return statistics.median_high(values) if values else None
