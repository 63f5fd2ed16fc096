"""Comparison of several runs with the first one, the baseline: parity and cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.evaluation.compare.cost import CostToTarget, compute_cost_to_target, find_common_target
from regauge.evaluation.compare.verdict import Parity, compare_pair, heldout_metrics
from regauge.monitoring.trackers import is_train_metric
from regauge.run_folders.run_folder import RunFolder, read_run_folder
from regauge.system.choices import did_you_mean
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.evaluation.compare.settings import Comparison
    from regauge.training.settings import Target


@dataclass(frozen=True)
class DivergenceSummary:
    """First value at which a run's recomputed step differs from the baseline, in words."""

    run: str
    sentence: str
    rows: tuple[dict[str, str], ...]
    """Table of nearby values."""


@dataclass(frozen=True)
class ComparisonResult:
    runs: tuple[RunFolder, ...]
    """The baseline, then the compared runs."""
    noise_runs: tuple[RunFolder, ...]
    """Baseline repeats."""
    parities: tuple[Parity, ...]
    """One per run except the baseline."""
    target: Target | None
    """Metric and threshold to reach; None if the runs do not share a metric."""
    tolerance: float
    """Largest relative difference that counts as equal."""
    costs: tuple[CostToTarget, ...]
    """Cost of each run up to the target; empty without a target."""
    divergences: tuple[DivergenceSummary, ...] = ()
    """First divergences of the runs with a recomputed step (`--localize`)."""


def compare_runs(settings: Comparison) -> ComparisonResult:
    """Read and compare runs.

    Raises SettingsError for a folder without a run, a metric that was not measured, or an unknown
    machine type.
    """
    runs = _with_unique_names(tuple(read_run_folder(Path(folder)) for folder in settings.runs))
    noise_runs = tuple(read_run_folder(Path(folder)) for folder in settings.noise_runs)
    for metric in settings.metrics:
        _check_metric(metric, runs[0].name, heldout_metrics(runs[0]))
    if settings.target:
        names = " and ".join(run.name for run in runs)
        _check_metric(settings.target.metric, names, {name for run in runs for name in run.series})
    target = settings.target or _find_target(runs)
    prices = settings.prices or (None,) * len(runs)
    pairs = zip(runs, prices, strict=True)
    return ComparisonResult(
        runs=runs,
        noise_runs=noise_runs,
        parities=tuple(
            compare_pair(runs[0], candidate, noise_runs, settings.tolerance, settings.metrics)
            for candidate in runs[1:]
        ),
        target=target,
        tolerance=settings.tolerance,
        costs=tuple(compute_cost_to_target(run, target, price) for run, price in pairs)
        if target
        else (),
    )


def _check_metric(metric: str, runs: str, measured: Iterable[str]) -> None:
    names = tuple(measured)
    if metric not in names:
        remedy = did_you_mean(metric, names) if names else "set evaluation.every_steps in them"
        raise SettingsError(f"{runs} did not measure '{metric}'", remedy)


def _with_unique_names(runs: tuple[RunFolder, ...]) -> tuple[RunFolder, ...]:
    if len({run.name for run in runs}) == len(runs):
        return runs
    return tuple(replace(run, name=str(run.folder)) for run in runs)


def _find_target(runs: tuple[RunFolder, ...]) -> Target | None:
    names = (name for name in runs[0].series if not is_train_metric(name))
    return next(filter(None, (find_common_target(runs, name) for name in names)), None)
