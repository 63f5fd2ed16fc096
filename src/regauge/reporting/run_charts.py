"""The charts of one run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from regauge.reporting.drawing import STYLES, Bar, Chart, Line, Place, bars, curves
from regauge.results.series import Series, smoothed
from regauge.trackers import of_training
from regauge.units import MEGA

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.results.run_folder import Run


def charts(run: Run, key: str) -> tuple[Chart, ...]:
    """Return the charts of a run; `key` keeps ids apart where a page has several runs."""
    place = Place(key, run.name)
    drawn = [
        *curves("Loss", _loss(run.series), place),
        *curves("Held-out metrics", _measured(run.series), place),
        *curves("Real tokens per second", _mean(run.series, "train/tokens_per_second"), place),
        *curves("Learning rate", _plain(run.series, "train/learning_rate"), place),
        *curves("Gradient norm", _mean(run.series, "train/gradient_norm"), place),
    ]
    drawn += bars("Memory of a process", memory([run]), place, unit=" MB")
    return tuple(drawn)


def _loss(series: dict[str, Series]) -> list[Line]:
    heldout = [
        Line(name.removesuffix("/loss"), points, "points")
        for name, points in series.items()
        if name.endswith("/loss") and not of_training(name)
    ]
    tasks = [name for name in series if name.startswith("train.") and name.endswith("/loss")]
    if tasks:
        own = [replace(_mean(series, name)[-1], label=name.removesuffix("/loss")) for name in tasks]
        return [*own, *heldout]
    train = [replace(line, label=f"train, {line.label}") for line in _mean(series, "train/loss")]
    return [*train, *heldout]


def _measured(series: dict[str, Series]) -> list[Line]:
    """Return the held-out metrics that share an axis from 0 to 1, at most one for each style."""
    found = [
        Line(name, points, "points")
        for name, points in series.items()
        if not of_training(name) and all(0 <= value <= 1 for _, value in points)
    ]
    return [line for line in found if not line.label.endswith("/loss")][: len(STYLES)]


def _mean(series: dict[str, Series], name: str) -> list[Line]:
    points = series.get(name, ())
    if len(points) < 8:  # noqa: PLR2004  (too few to have noise)
        return _plain(series, name)
    return [Line("as logged", points, "raw"), Line("smoothed", smoothed(points), "mean")]


def _plain(series: dict[str, Series], name: str) -> list[Line]:
    return [Line(name.rpartition("/")[2].replace("_", " "), series.get(name, ()), "mean")]


def memory(runs: Iterable[Run]) -> list[Bar]:
    """Return what the memory of each run's first process held, by part."""
    known = []
    for run in runs:
        parts = dict(run.ledger.get("memory") or {})
        if not parts:
            continue
        peak = parts.pop("peak", None)
        rest = {} if peak is None else {"all else": max(0, peak - sum(parts.values()))}
        pieces = {**parts, **rest}.items()
        known.append(Bar(run.name, tuple((name, size / MEGA) for name, size in pieces)))
    return known
