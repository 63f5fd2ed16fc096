"""Charts of a comparison: all runs together, with the tolerance and the run-to-run noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.evaluation.compare import sentences
from regauge.evaluation.compare.cost import interpolate
from regauge.evaluation.compare.gaps import value_at
from regauge.evaluation.compare.verdict import heldout_metrics
from regauge.evaluation.report.drawing import (
    AxisScale,
    Band,
    Bar,
    Chart,
    ChartContext,
    Curve,
    ReferenceLine,
    draw_bars,
    draw_curves,
)
from regauge.evaluation.report.run_charts import build_memory_bars
from regauge.monitoring.trackers import TRAIN_LOSS
from regauge.run_folders.series import smooth

if TYPE_CHECKING:
    from regauge.evaluation.compare.compare import ComparisonResult
    from regauge.evaluation.compare.gaps import MetricComparison
    from regauge.run_folders.run_folder import RunFolder
    from regauge.run_folders.series import Points, Series

MAX_METRICS = 4
"""Most held-out metrics that are drawn."""
MIN_DIFFERENCE = 1e-9
"""Smallest difference that is drawn; a logarithmic axis has no zero."""
SPEED = "train/tokens_per_second"
NOISE_LABEL = "run-to-run noise"
DIFFERENCES = AxisScale(y="relative difference", logarithmic=True)


def build_charts(comparison: ComparisonResult, key: str) -> tuple[Chart, ...]:
    """Return the charts of a comparison; `key` makes their ids unique in the page."""
    runs = comparison.runs
    context = ChartContext(key, " and ".join(run.name for run in runs))
    charts = [
        chart
        for metric in _select_metrics(comparison)
        for chart in _draw_metric(comparison, metric, context)
    ]
    charts += draw_curves("Training loss, smoothed", _loss_curves(comparison), context)
    charts += _draw_loss_differences(comparison, context)
    charts += _draw_metric_by_cost(comparison, context)
    speed_title = "Tokens per second, padding included"
    charts += draw_bars(speed_title, _build_speed_bars(comparison), context, unit=" tokens/s")
    charts += _draw_scaling(comparison, context)
    charts += draw_bars("Memory of rank 0", build_memory_bars(runs), context, unit=" MB")
    return tuple(charts)


def _select_metrics(comparison: ComparisonResult) -> list[MetricComparison]:
    """Return the first metrics that a run shares with the baseline, each once."""
    by_name = {metric.name: metric for parity in comparison.parities for metric in parity.metrics}
    return list(by_name.values())[:MAX_METRICS]


def _draw_metric(
    comparison: ComparisonResult, metric: MetricComparison, context: ChartContext
) -> list[Chart]:
    """Draw a held-out metric of all runs, with tolerance and noise around the baseline."""
    curves = [
        Curve(run.name, heldout_metrics(run).get(metric.name, ()), "points")
        for run in comparison.runs
    ]
    baseline = heldout_metrics(comparison.runs[0])[metric.name]
    label = f"± {sentences.format_difference(metric.tolerance)}"
    references = [_build_band(label, baseline, ((0, metric.tolerance),))]
    if metric.noise:
        references.append(_build_band(NOISE_LABEL, baseline, metric.noise, hatched=True))
    return draw_curves(metric.name, curves, context, references=tuple(references))


def _build_band(label: str, baseline: Series, widths: Series, *, hatched: bool = False) -> Band:
    """Return the band of a relative width around a series."""
    lower = tuple((step, value - abs(value) * value_at(widths, step)) for step, value in baseline)
    upper = tuple((step, value + abs(value) * value_at(widths, step)) for step, value in baseline)
    return Band(label, lower, upper, hatched)


def _loss_curves(comparison: ComparisonResult) -> list[Curve]:
    return [
        Curve(run.name, smooth(run.series.get(TRAIN_LOSS, ())), "mean") for run in comparison.runs
    ]


def _draw_loss_differences(comparison: ComparisonResult, context: ChartContext) -> list[Chart]:
    """Draw the relative difference of each run's training loss from the baseline, by step."""
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
    return draw_curves(title, curves, context, scale=DIFFERENCES, references=(tolerance,))


def _draw_metric_by_cost(comparison: ComparisonResult, context: ChartContext) -> list[Chart]:
    """Draw the target's metric against dollars, or against machine time if a price is unknown."""
    if comparison.target is None:
        return []
    is_priced = all(cost.price is not None for cost in comparison.costs)
    curves = [
        Curve(run.name, _metric_by_cost(run, comparison, is_priced=is_priced), "points")
        for run in comparison.runs
    ]
    target = ReferenceLine("target", comparison.target.threshold)
    x = "dollars" if is_priced else "seconds of machine time"
    title = f"{comparison.target.metric} against {x}"
    return draw_curves(title, curves, context, scale=AxisScale(x=x), references=(target,))


def _metric_by_cost(run: RunFolder, comparison: ComparisonResult, *, is_priced: bool) -> Points:
    """Return (cost until the evaluation, value) of the target's metric."""
    if comparison.target is None:
        return ()
    seconds = run.cost_series.get("machine_seconds", ())
    price = next((cost.price for cost in comparison.costs if cost.run == run.name), None)
    factor = price.usd_per_second if is_priced and price else 1.0
    points = [
        (interpolate(seconds, step), value)
        for step, value in run.series.get(comparison.target.metric, ())
    ]
    return tuple((cost * factor, value) for cost, value in points if cost is not None)


def _build_speed_bars(comparison: ComparisonResult) -> list[Bar]:
    """Return the tokens per second of each run, split into real tokens and padding."""
    bars = []
    for run in comparison.runs:
        speed, padding = _median(run.series.get(SPEED, ())), run.ledger.get("padding_fraction")
        if speed is None or padding is None or padding >= 1:
            continue
        total = speed / (1 - padding)
        bars.append(Bar(run.name, (("real tokens", speed), ("padding", total - speed))))
    return bars


def _draw_scaling(comparison: ComparisonResult, context: ChartContext) -> list[Chart]:
    """Draw the speed by number of devices, if the runs differ in it, and linear scaling."""
    speeds: dict[int, float] = {}
    for run in comparison.runs:
        speed = _median(run.series.get(SPEED, ()))
        if run.num_devices is not None and speed is not None:
            speeds[run.num_devices] = max(speed, speeds.get(run.num_devices, 0.0))
    if len(speeds) < 2:  # noqa: PLR2004  (a line)
        return []
    measured = tuple(sorted(speeds.items()))
    num_devices, speed = measured[0]
    linear = tuple((count, speed * count / num_devices) for count, _ in measured)
    curves = [Curve("measured", measured, "points"), Curve("linear scaling", linear, "mean")]
    scale = AxisScale(x="device")
    return draw_curves("Real tokens per second", curves, context, scale=scale)


def _median(series: Series) -> float | None:
    """Return the median value; the first intervals of a run are slower."""
    values = sorted(value for _, value in series)
    return values[len(values) // 2] if values else None
