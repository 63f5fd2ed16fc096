"""Some runs beside the first one: what each of them shows, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.choices import did_you_mean
from regauge.comparison.cost import Spent, common_target, to_target
from regauge.comparison.verdict import Parity, compare, measured
from regauge.errors import SettingsError
from regauge.results.run_folder import Run, read
from regauge.trackers import of_training

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.comparison.settings import Comparison
    from regauge.training.settings import Target


@dataclass(frozen=True)
class Place:
    """Where a run parts from the first, in words: what is named, and the values around it."""

    run: str
    named: str
    values: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Compared:
    """What a comparison has read, and what it found."""

    runs: tuple[Run, ...]
    """The first one, and those that are compared with it."""
    noise: tuple[Run, ...]
    """Repetitions of the first one."""
    parities: tuple[Parity, ...]
    """One for each run but the first."""
    target: Target | None
    """What counts as converged; None where no metric was measured by all runs."""
    band: float
    """Largest relative difference that counts as none."""
    spent: tuple[Spent, ...]
    """Up to the target, one for each run; empty without a target."""
    places: tuple[Place, ...] = ()
    """Where runs part from the first, for those whose step was computed again."""


def compared(settings: Comparison) -> Compared:
    """Read the runs of a comparison and compare them.

    Raises SettingsError for a folder that holds no run, a metric that was not measured, or
    a price of an unknown machine type.
    """
    runs = _told_apart(tuple(read(Path(folder)) for folder in settings.runs))
    noise = tuple(read(Path(folder)) for folder in settings.noise)
    for metric in settings.metrics:
        _check(metric, runs[0].name, measured(runs[0]))
    if settings.target:
        names = " and ".join(run.name for run in runs)
        _check(settings.target.metric, names, {name for run in runs for name in run.series})
    target = settings.target or _target(runs)
    prices = settings.prices or (None,) * len(runs)
    pairs = zip(runs, prices, strict=True)
    return Compared(
        runs=runs,
        noise=noise,
        parities=tuple(
            compare(runs[0], other, noise, settings.band, settings.metrics) for other in runs[1:]
        ),
        target=target,
        band=settings.band,
        spent=tuple(to_target(run, target, price) for run, price in pairs) if target else (),
    )


def _check(metric: str, runs: str, known: Iterable[str]) -> None:
    """Raise SettingsError for a metric that is not among those which some runs know."""
    names = tuple(known)
    if metric not in names:
        nearest = did_you_mean(metric, names) if names else "set evaluation.every_steps in them"
        raise SettingsError(f"{runs} measured no '{metric}'", nearest)


def _told_apart(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """Return runs by their folders where two of them have the same name."""
    if len({run.name for run in runs}) == len(runs):
        return runs
    return tuple(replace(run, name=str(run.folder)) for run in runs)


def _target(runs: tuple[Run, ...]) -> Target | None:
    """Return the target of the first metric that every run has measured on held-out rows."""
    names = (name for name in runs[0].series if not of_training(name))
    return next(filter(None, (common_target(runs, name) for name in names)), None)
