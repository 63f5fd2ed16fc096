"""Parity of two runs: held-out metrics within a tolerance, and the first different step.

Everything is read from the run folders. Two runs are comparable if they trained on the same rows in
the same order, from the same initial weights, with the same schedule. They may differ in how they
were computed: device, precision, parallelism, kernels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from regauge.config import flatten
from regauge.evaluation.compare.gaps import Gap, MetricComparison, align, value_at
from regauge.monitoring.trackers import AVERAGED_STEPS, TRAIN_LOSS, is_train_metric
from regauge.run_folders.evaluation_table import build_table
from regauge.system import choices
from regauge.tasks import ITEMS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from regauge.accelerators import Accelerator
    from regauge.run_folders.run_folder import RunFolder
    from regauge.run_folders.series import Series

Verdict = Literal["pass", "fail", "inconclusive"]
DEFAULT_TOLERANCE = 0.001
ROUNDING_TOLERANCE = 1e-5
"""Relative difference explained by rounding during the first tens of steps."""
NOISE_FACTOR = 4.0
"""Multiple of the noise floor above which a training value counts as different."""
GRADIENT_NORM, LEARNING_RATE = "train/grad_norm", "train/learning_rate"
BLOCKING_SETTINGS = (
    "seed",
    "task",
    "model",
    "optimizer",
    "batch.rows",
    "stop.steps",
    "stop.epochs",
    "evaluation.rows",
)
"""Settings and tables that must be equal in comparable runs."""
COMPUTE_SETTINGS = ("model.attention", "model.path", "model.weights")
"""Exceptions in those tables: settings that only change how the run is computed."""
FACT_NAMES = {
    "data_fingerprint": "the prepared data",
    "weights_checksum": "the weights of step 0",
}
"""Identity fact -> name in sentences."""
IGNORED_SETTINGS = (
    "output",
    "stop",
    "execution.price",
    "evaluation.every_steps",
    "execution.supervision",
    "models",
    "evaluate",
    "data.path",
)
"""Settings whose differences are not reported."""
_TASK_SETTING = re.compile(r"task\.([^.]+)\.(data\.path|batch\.microbatch_rows)")
"""Task settings named like the run's: `data.path.<task>`."""
ENVIRONMENT_KEYS = ("platform", "host", "packages")
"""Keys that identify an environment; equal programs give equal bits in equal environments."""


@dataclass(frozen=True)
class SettingDifference:
    key: str
    baseline: Any
    candidate: Any


@dataclass(frozen=True)
class FirstDivergence:
    """First training value that differs by more than noise."""

    series_name: str
    gap: Gap


@dataclass(frozen=True)
class Parity:
    baseline: str
    """Name of the first run."""
    candidate: str
    """Name of the compared run."""
    blocking_differences: tuple[SettingDifference, ...]
    """Differences that make the runs incomparable; empty if they are comparable."""
    compute_differences: tuple[SettingDifference, ...]
    """Differences in how the runs were computed."""
    metrics: tuple[MetricComparison, ...]
    loss_gaps: tuple[Gap, ...]
    """Training loss at every step logged by both."""
    noise_floor: Series
    """Step -> largest training loss difference between the baseline and the repeats."""
    first_divergence: FirstDivergence | None
    """First different training value, if any."""
    expects_equal_bits: bool
    """Whether both ran the same program, on one machine, with deterministic kernels."""
    first_lr_difference: int | None
    """First step with a different learning rate, if any."""
    has_noise_floor: bool
    """Whether baseline repeats were given."""

    @property
    def verdict(self) -> Verdict:
        """`fail` if a metric exceeds its limit, `inconclusive` if no metric proves anything."""
        if self.blocking_differences or not self.metrics:
            return "inconclusive"
        if not all(metric.is_within_limits for metric in self.metrics):
            return "fail"
        return (
            "pass"
            if any(metric.can_resolve_tolerance for metric in self.metrics)
            else "inconclusive"
        )


def compare_pair(
    baseline: RunFolder,
    candidate: RunFolder,
    noise_runs: Sequence[RunFolder] = (),
    tolerance: float = DEFAULT_TOLERANCE,
    metrics: Sequence[str] = (),
) -> Parity:
    """Compare a run with the baseline.

    `noise_runs` are baseline repeats with another summation order. `metrics` names the held-out
    metrics for the verdict; default: all measured by both runs.
    """
    differences = find_differences(baseline, candidate)
    blocking = tuple(item for item in differences if blocks_comparison(item.key))
    compute = tuple(item for item in differences if not blocks_comparison(item.key))
    candidate_metrics = heldout_metrics(candidate)
    names = [name for name in heldout_metrics(baseline) if name in candidate_metrics]
    compared = (
        _compare_metric(name, (baseline, candidate), noise_runs, tolerance)
        for name in metrics or names
        if name in names
    )
    rates = align(baseline.series.get(LEARNING_RATE, ()), candidate.series.get(LEARNING_RATE, ()))
    lr_differences = (gap.step for gap in rates if gap.difference > ROUNDING_TOLERANCE)
    expects_equal_bits = not compute and _is_bitwise_reproducible(baseline, candidate)
    return Parity(
        baseline=baseline.name,
        candidate=candidate.name,
        blocking_differences=blocking,
        compute_differences=compute,
        metrics=tuple(metric for metric in compared if metric.gaps),
        loss_gaps=_align_series(TRAIN_LOSS, baseline, candidate),
        noise_floor=_noise_floor(TRAIN_LOSS, baseline, noise_runs),
        first_divergence=_find_first_divergence(
            (baseline, candidate), noise_runs, expects_equal_bits=expects_equal_bits
        ),
        expects_equal_bits=expects_equal_bits,
        first_lr_difference=next(lr_differences, None),
        has_noise_floor=bool(noise_runs),
    )


def _compare_metric(
    name: str,
    pair: tuple[RunFolder, RunFolder],
    noise_runs: Sequence[RunFolder],
    tolerance: float,
) -> MetricComparison:
    baseline, candidate = pair
    gaps = align(heldout_metrics(baseline)[name], heldout_metrics(candidate)[name])
    noise = _noise_floor(name, baseline, noise_runs)
    return MetricComparison(name, gaps, noise, tolerance, _count_items(baseline, name))


def heldout_metrics(run: RunFolder) -> dict[str, Series]:
    """Return one series per held-out metric.

    A training run's metric has one point per evaluation. A metric from an `evaluation.json` has one
    point, at step 0, and is named after its row: `trained: loss`.
    """
    return {
        name: series for name, series in _heldout_series(run).items() if _short_name(name) != ITEMS
    }


def _count_items(run: RunFolder, name: str) -> float | None:
    """Return the number of items averaged by a metric; None if it was not logged."""
    series = _heldout_series(run).get(name.removesuffix(_short_name(name)) + ITEMS)
    return series[-1][1] if series else None


def _short_name(name: str) -> str:
    """Return the metric without the prefix: `loss` for `heldout/loss` or `trained: loss`."""
    return re.split(r"/|: ", name)[-1]


def _heldout_series(run: RunFolder) -> dict[str, Series]:
    series = {name: points for name, points in run.series.items() if not is_train_metric(name)}
    if run.evaluation:
        table = build_table(run.evaluation)
        for name, values in zip(table.names, table.values, strict=True):
            for metric, value in zip(table.metrics, values, strict=True):
                if value is not None:
                    series[f"{name}: {metric}"] = ((0, value),)
    return series


def find_differences(baseline: RunFolder, candidate: RunFolder) -> list[SettingDifference]:
    """Return differing settings, facts and packages, without the ignored settings."""
    first, second = _comparable_values(baseline), _comparable_values(candidate)
    keys = [*first, *(key for key in second if key not in first)]
    return [
        SettingDifference(key, first.get(key), second.get(key))
        for key in keys
        if first.get(key) != second.get(key)
        and not _is_in_tables(key, IGNORED_SETTINGS, but=BLOCKING_SETTINGS)
    ]


def blocks_comparison(key: str) -> bool:
    """Return whether a difference in this key makes two runs incomparable."""
    is_blocking = _is_in_tables(key, BLOCKING_SETTINGS) and not _is_in_tables(key, COMPUTE_SETTINGS)
    return key in FACT_NAMES.values() or is_blocking


def _find_first_divergence(
    pair: tuple[RunFolder, RunFolder], noise_runs: Sequence[RunFolder], *, expects_equal_bits: bool
) -> FirstDivergence | None:
    """Return the first training value that differs by more than noise.

    If the runs should be equal to the last bit, any difference counts.
    """
    divergences = []
    for name in (TRAIN_LOSS, GRADIENT_NORM):
        floor = _noise_floor(name, pair[0], noise_runs)
        for gap in _align_series(name, *pair):
            noise = max(ROUNDING_TOLERANCE, NOISE_FACTOR * value_at(floor, gap.step))
            if gap.difference > (0.0 if expects_equal_bits else noise):
                divergences.append(FirstDivergence(name, gap))
                break
    return min(divergences, key=lambda divergence: divergence.gap.step, default=None)


def _is_bitwise_reproducible(baseline: RunFolder, candidate: RunFolder) -> bool:
    """Return whether machine, software and world size agree, and all kernels are deterministic.

    Another process count sums the logged values in another order.
    """
    pair = (baseline, candidate)
    world_sizes = baseline.world_sizes | candidate.world_sizes
    if len(world_sizes) > 1:
        return False
    kinds = [run.settings.get("accelerator", {}).get("kind") for run in pair]
    if kinds[0] != kinds[1] or kinds[0] not in choices.names("accelerators"):
        return False
    environments = [[run.environment.get(name) for name in ENVIRONMENT_KEYS] for run in pair]
    accelerator: type[Accelerator] = choices.load("accelerators", kinds[0])
    is_same_environment = environments[0] == environments[1] and all(environments[0])
    return is_same_environment and accelerator.is_deterministic


def _noise_floor(name: str, baseline: RunFolder, noise_runs: Sequence[RunFolder]) -> Series:
    """Return the running maximum of the differences between the baseline and the repeats."""
    gaps = [gap for run in noise_runs for gap in _align_series(name, baseline, run)]
    gaps.sort(key=lambda gap: gap.step)
    largest = accumulate((gap.difference for gap in gaps), max)
    return tuple({gap.step: floor for gap, floor in zip(gaps, largest, strict=True)}.items())


def _align_series(name: str, baseline: RunFolder, candidate: RunFolder) -> tuple[Gap, ...]:
    """Return a metric's values at every shared step.

    A training loss is the mean over the steps since the last line or resume, so lines that average
    different steps are left out.
    """
    gaps = align(_find_series(baseline, name), _find_series(candidate, name))
    if name != TRAIN_LOSS:
        return gaps
    first, second = (dict(run.series.get(AVERAGED_STEPS, ())) for run in (baseline, candidate))
    return tuple(
        gap for gap in gaps if gap.step in first and first[gap.step] == second.get(gap.step)
    )


def _find_series(run: RunFolder, name: str) -> Series:
    return run.series.get(name) or heldout_metrics(run).get(name, ())


def _comparable_values(run: RunFolder) -> Mapping[str, Any]:
    facts = {words: run.identity.get(name) for name, words in FACT_NAMES.items()}
    versions = run.environment.get("packages") or {}
    packages = {f"package {name}": version for name, version in versions.items()}
    settings = {_TASK_SETTING.sub(r"\2.\1", key): value for key, value in flatten(run.settings)}
    device = run.environment.get("device") or {}
    products = {f"fp32 {name}": value for name, value in flatten(device.get("fp32_products") or {})}
    return {**facts, **settings, **packages, **products}


def _is_in_tables(key: str, tables: tuple[str, ...], but: tuple[str, ...] = ()) -> bool:
    is_inside = any(key == table or key.startswith(f"{table}.") for table in tables)
    return is_inside and key not in but
