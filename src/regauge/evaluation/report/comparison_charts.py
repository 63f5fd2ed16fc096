"""Charts of a comparison: all runs together, with the tolerance and the run-to-run noise."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from regauge.evaluation.compare import sentences
from regauge.evaluation.compare.cost import interpolate
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
from regauge.evaluation.report.run_charts import chart_memory
from regauge.monitoring.trackers import TRAIN_LOSS
from regauge.run_folders.series import smooth

if TYPE_CHECKING:
    from regauge.evaluation.compare.compare import ComparisonResult
    from regauge.evaluation.compare.gaps import MetricComparison
    from regauge.run_folders.run_folder import RunFolder
    from regauge.run_folders.series import Series

MAX_METRICS = 4
"""Most held-out metrics that are drawn."""
MIN_DIFFERENCE = 1e-9
"""Smallest difference that is drawn; a logarithmic axis has no zero."""
SPEED = "train/tokens_per_second"
NOISE_LABEL = "run-to-run noise"
DIFFERENCES = AxisScale(y="relative difference", logarithmic=True)


def build_charts(comparison: ComparisonResult) -> list[Chart]:
    """Return the charts of a comparison."""
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
    """Return the first metrics that a run shares with the baseline, each once."""
    by_name = {metric.name: metric for parity in comparison.parities for metric in parity.metrics}
    return list(by_name.values())[:MAX_METRICS]


def _chart_metric(comparison: ComparisonResult, metric: MetricComparison) -> list[Chart]:
    """Return a chart of a held-out metric, with tolerance and noise around the baseline."""
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
    """Return the band of a relative width around a series."""
    lower = tuple((step, value - abs(value) * value_at(widths, step)) for step, value in baseline)
    upper = tuple((step, value + abs(value) * value_at(widths, step)) for step, value in baseline)
    return Band(label, lower, upper, hatched)


def _loss_curves(comparison: ComparisonResult) -> list[Curve]:
    return [
        Curve(run.name, smooth(run.series.get(TRAIN_LOSS, ())), "mean") for run in comparison.runs
    ]


def _chart_loss_differences(comparison: ComparisonResult) -> list[Chart]:
    """Return a chart of the relative differences from the baseline's training loss."""
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
    """Return a chart of the target's metric against dollars, or machine time without all prices."""
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
    """Return a chart of the tokens per second of each run, split into real tokens and padding."""
    bars = []
    for run in comparison.runs:
        speed, padding = _find_speed(run), run.ledger.get("padding_fraction")
        if speed is None or padding is None or padding >= 1:
            continue
        total = speed / (1 - padding)
        bars.append(Bar(run.name, (("real tokens", speed), ("padding", total - speed))))
    return chart_bars("Tokens per second, padding included", bars, " tokens/s")


def _chart_scaling(comparison: ComparisonResult) -> list[Chart]:
    """Return a chart of the speed by number of devices, if the runs differ in it."""
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
    """Return the median tokens per second; the first intervals of a run are slower."""
    values = [value for _, value in run.series.get(SPEED, ())]
    return statistics.median_high(values) if values else None
