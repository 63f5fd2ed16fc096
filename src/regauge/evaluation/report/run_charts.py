"""Charts of one training run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from regauge.evaluation.report.drawing import (
    STYLES,
    Bar,
    Chart,
    ChartContext,
    Curve,
    draw_bars,
    draw_curves,
)
from regauge.monitoring.trackers import is_train_metric
from regauge.run_folders.series import Series, smooth
from regauge.system.units import MEGA

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.run_folders.run_folder import RunFolder


def build_charts(run: RunFolder, key: str) -> tuple[Chart, ...]:
    """Return the charts of a run; `key` makes their ids unique in the page."""
    context = ChartContext(key, run.name)
    series = run.series
    speed = _smoothed_curves(series, "train/tokens_per_second")
    return (
        *draw_curves("Loss", _loss_curves(series), context),
        *_draw_heldout_curves(series, context),
        *draw_curves("Real tokens per second", speed, context),
        *draw_curves("Learning rate", _plain_curve(series, "train/learning_rate"), context),
        *draw_curves("Gradient norm", _smoothed_curves(series, "train/grad_norm"), context),
        *draw_bars("Memory of rank 0", build_memory_bars([run]), context, unit=" MB"),
    )


def _loss_curves(series: dict[str, Series]) -> list[Curve]:
    heldout = [
        Curve(name.removesuffix("/loss"), points, "points")
        for name, points in series.items()
        if name.endswith("/loss") and not is_train_metric(name)
    ]
    tasks = [name for name in series if name.startswith("train.") and name.endswith("/loss")]
    if tasks:
        by_task = [
            replace(_smoothed_curves(series, name)[-1], label=name.removesuffix("/loss"))
            for name in tasks
        ]
        return [*by_task, *heldout]
    train = _smoothed_curves(series, "train/loss")
    return [*(replace(curve, label=f"train, {curve.label}") for curve in train), *heldout]


def _draw_heldout_curves(series: dict[str, Series], context: ChartContext) -> list[Chart]:
    """Return charts of all held-out metrics except losses and counts.

    Metrics between -1 and 1 share charts, as many as there are line styles; any other metric has a
    chart of its own.
    """
    curves = [
        Curve(name, points, "points")
        for name, points in series.items()
        if not is_train_metric(name) and not name.endswith(("/loss", "/items"))
    ]
    is_bounded = [all(abs(value) <= 1 for _, value in curve.points) for curve in curves]
    bounded = list(itertools.compress(curves, is_bounded))
    groups = [bounded[start : start + len(STYLES)] for start in range(0, len(bounded), len(STYLES))]
    groups += [[curve] for curve, shares in zip(curves, is_bounded, strict=True) if not shares]
    charts: list[Chart] = []
    for number, group in enumerate(groups, start=1):
        title = "Held-out metrics" if number == 1 else f"Held-out metrics ({number})"
        charts += draw_curves(title, group, context)
    return charts


def _smoothed_curves(series: dict[str, Series], name: str) -> list[Curve]:
    points = series.get(name, ())
    if len(points) < 8:  # noqa: PLR2004  (too few to have noise)
        return _plain_curve(series, name)
    return [Curve("as logged", points, "raw"), Curve("smoothed", smooth(points), "mean")]


def _plain_curve(series: dict[str, Series], name: str) -> list[Curve]:
    return [Curve(name.rpartition("/")[2].replace("_", " "), series.get(name, ()), "mean")]


def build_memory_bars(runs: Iterable[RunFolder]) -> list[Bar]:
    """Return one bar per run: the memory of rank 0 in MB, by content."""
    bars = []
    for run in runs:
        parts = dict(run.ledger.get("memory_bytes") or {})
        if not parts:
            continue
        peak = parts.pop("peak", None)
        rest = {} if peak is None else {"other": max(0, peak - sum(parts.values()))}
        pieces = {**parts, **rest}.items()
        bars.append(Bar(run.name, tuple((name, size / MEGA) for name, size in pieces)))
    return bars
