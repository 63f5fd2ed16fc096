"""Charts for one training run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from regauge.evaluation.report.charts import (
    NUM_LOOKS,
    Bar,
    Chart,
    Curve,
    chart_bars,
    chart_curves,
)
from regauge.monitoring.trackers import is_train_metric
from regauge.run_folders.series import Series, smooth
from regauge.system.units import MEGA

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.run_folders.run_folder import RunFolder


def build_charts(run: RunFolder) -> list[Chart]:
    series = run.series
    return [
        *chart_curves("Loss", _loss_curves(series)),
        *_chart_heldout_metrics(series),
        *chart_curves(
            "Real tokens per second", _smoothed_curves(series, "train/tokens_per_second")
        ),
        *chart_curves("Learning rate", _plain_curve(series, "train/learning_rate")),
        *chart_curves("Gradient norm", _smoothed_curves(series, "train/grad_norm")),
        *chart_memory([run]),
    ]


def chart_memory(runs: Iterable[RunFolder]) -> list[Chart]:
    """Return a chart with one bar per run: rank 0 memory by content."""
    bars = []
    for run in runs:
        parts = dict(run.ledger.get("memory_bytes") or {})
        if not parts:
            continue
        peak = parts.pop("peak", None)
        rest = {} if peak is None else {"other": max(0, peak - sum(parts.values()))}
        pieces = {**parts, **rest}.items()
        bars.append(Bar(run.name, tuple((name, size / MEGA) for name, size in pieces)))
    return chart_bars("Memory of rank 0", bars, " MB")


def _loss_curves(series: dict[str, Series]) -> list[Curve]:
    heldout = [
        Curve(name.removesuffix("/loss"), points, "points")
        for name, points in series.items()
        if name.endswith("/loss") and not is_train_metric(name)
    ]
    by_task = [
        replace(_smoothed_curves(series, name)[-1], label=name.removesuffix("/loss"))
        for name in series
        if name.startswith("train.") and name.endswith("/loss")
    ]
    train = _smoothed_curves(series, "train/loss")
    labelled = [replace(curve, label=f"train, {curve.label}") for curve in train]
    return [*(by_task or labelled), *heldout]


def _chart_heldout_metrics(series: dict[str, Series]) -> list[Chart]:
    """Return charts of all held-out metrics except losses and counts.

    Metrics between -1 and 1 share charts, as many as there are looks; any other metric has its own
    chart.
    """
    bounded: list[Curve] = []
    unbounded: list[Curve] = []
    for name, points in series.items():
        if is_train_metric(name) or name.endswith(("/loss", "/items")):
            continue
        is_bounded = all(abs(value) <= 1 for _, value in points)
        (bounded if is_bounded else unbounded).append(Curve(name, points, "points"))
    groups = [bounded[start : start + NUM_LOOKS] for start in range(0, len(bounded), NUM_LOOKS)]
    charts: list[Chart] = []
    for number, group in enumerate([*groups, *([curve] for curve in unbounded)], start=1):
        title = "Held-out metrics" if number == 1 else f"Held-out metrics ({number})"
        charts += chart_curves(title, group)
    return charts


def _smoothed_curves(series: dict[str, Series], name: str) -> list[Curve]:
    points = series.get(name, ())
    if len(points) < 8:  # noqa: PLR2004  (too few to have noise)
        return _plain_curve(series, name)
    return [Curve("as logged", points, "raw"), Curve("smoothed", smooth(points), "mean")]


def _plain_curve(series: dict[str, Series], name: str) -> list[Curve]:
    return [Curve(name.rpartition("/")[2].replace("_", " "), series.get(name, ()), "mean")]
