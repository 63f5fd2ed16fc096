"""Comparison results in sentences; the first sentence of each pair is the verdict."""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING, Any

from regauge.evaluation.compare.cost import CostToTarget, rank_by_cost, relative_saving
from regauge.evaluation.compare.gaps import value_at
from regauge.evaluation.compare.verdict import Parity, SettingDifference
from regauge.run_folders import formatting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.evaluation.compare.compare import ComparisonResult
    from regauge.evaluation.compare.gaps import Gap, MetricComparison
    from regauge.training.settings import Target

MAX_NAMED_DIFFERENCES = 3
"""Differing settings named in one sentence."""
SHOWN_HASH_CHARACTERS = 12
_HASH = re.compile(r"[0-9a-f]{32,}")


def describe_parity(parity: Parity) -> tuple[str, ...]:
    """Return the verdict on a run, then the evidence, one sentence each."""
    if parity.blocking_differences:
        return (_describe_blocking(parity),)
    if not parity.metrics:
        runs = f"{parity.baseline} and {parity.candidate}"
        return (f"Inconclusive: {runs} were never evaluated at the same step.",)
    sentences = [_describe_verdict(parity), *_describe_coarse_metrics(parity)]
    if not parity.has_noise_floor:
        sentences.append(f"The run-to-run noise of {parity.baseline} was not measured.")
    if parity.first_lr_difference is not None:
        sentences.append(f"The learning rates differ from step {parity.first_lr_difference}.")
    if parity.first_divergence is not None:
        gap = parity.first_divergence.gap
        name = parity.first_divergence.series_name.rpartition("/")[2].replace("_", " ")
        sentences.append(
            f"Training diverges at step {gap.step}: {name} {gap.baseline:.9g} and "
            f"{gap.candidate:.9g}, a difference of {format_difference(gap.difference)}."
        )
    elif parity.loss_gaps:
        sentences.append(f"Training does not diverge up to step {parity.loss_gaps[-1].step}.")
    if parity.compute_differences:
        differences = format_differences(parity.compute_differences)
        sentences.append(f"Different execution settings: {differences}.")
    return tuple(sentences)


def suggest_remedy(parity: Parity) -> str:
    """Return the next action after a verdict other than `pass`."""
    if parity.blocking_differences:
        return "start both runs from one run file and change only how it is executed"
    if not parity.metrics:
        return "set evaluation.every_steps to the same value"
    if parity.verdict == "inconclusive":
        return "hold out more rows or raise comparison.tolerance"
    if not parity.has_noise_floor:
        return "add --noise-floor to measure the run-to-run noise"
    return "add --localize to find the first module that differs"


def describe_costs(comparison: ComparisonResult) -> tuple[str, ...]:
    """Return each run's cost up to the target, the cheapest run, and the unknown prices."""
    if comparison.target is None:
        return ("No metric was measured by all runs, so there is no common target.",)
    sentences = [
        _describe_cost(cost, comparison.target)
        for cost in comparison.costs
        if cost.step is not None
    ]
    sentences += (*describe_unreached(comparison), *describe_cheapest(comparison))
    unpriced = [cost.run for cost in comparison.costs if cost.price is None]
    if unpriced:
        keys = (
            "execution.price.instance or execution.price.usd_per_hour in its run file, "
            "or comparison.prices"
        )
        sentences.append(f"The dollar cost of {', '.join(unpriced)} is unknown; set {keys}.")
    today = dt.datetime.now(tz=dt.UTC).date()
    warnings = {
        cost.price.staleness_warning(today) for cost in comparison.costs if cost.price is not None
    }
    stale = sorted(f"{warning[0].upper()}{warning[1:]}." for warning in warnings if warning)
    return (*sentences, *stale)


def describe_cheapest(comparison: ComparisonResult) -> tuple[str, ...]:
    """Return a sentence on the cheapest run, if two or more reached the target at known prices."""
    ranking = rank_by_cost(comparison.costs)
    if comparison.target is None or len(ranking) < 2:  # noqa: PLR2004  (a comparison needs two)
        return ()
    cheapest, *dearer = ranking
    savings = [(cost.run, relative_saving(cheapest, cost)) for cost in dearer]
    less = ", ".join(
        f"{formatting.percent(saving)} less than {run}"
        for run, saving in savings
        if saving is not None
    )
    target = format_target(comparison.target)
    savings_text = f": {less}" if less else ""  # no ratio exists if nothing was paid
    return (f"{cheapest.run} reached {target} at the lowest cost{savings_text}.",)


def describe_unreached(comparison: ComparisonResult) -> tuple[str, ...]:
    """Return a sentence for each run that missed the target, with the best value."""
    if comparison.target is None:
        return ()
    target = format_target(comparison.target)
    return tuple(
        f"{cost.run} did not reach {target}: {_describe_best(cost)}."
        for cost in comparison.costs
        if cost.step is None
    )


def build_cost_table(comparison: ComparisonResult) -> list[dict[str, Any]]:
    """Return one row per run: the cost at the target, as numbers."""
    return [
        {
            "name": cost.run,
            "step": cost.step,
            "machine_seconds": cost.machine_seconds,
            "device_seconds": cost.device_seconds,
            "usd": cost.usd,
            "max_joules": cost.max_joules,
            "usd_per_hour": None if cost.price is None else cost.price.usd_per_hour,
        }
        for cost in comparison.costs
    ]


def format_target(target: Target) -> str:
    """Return a target in words: heldout/loss of at most 2.310."""
    bound = "at most" if target.at_least is None else "at least"
    return f"{target.metric} of {bound} {formatting.number(target.threshold)}"


def _describe_cost(cost: CostToTarget, target: Target) -> str:
    interval = ""
    if cost.interval is not None:
        interval = " (interpolated between {} and {})".format(*cost.interval)
    usd = "unknown cost" if cost.usd is None else formatting.dollars(cost.usd)
    price = "" if cost.price is None else f" at {cost.price.description}"
    energy = "" if cost.max_joules is None else f", at most {formatting.count(cost.max_joules)}J"
    return (
        f"{cost.run} reached {format_target(target)} at step {cost.step:,.4g}{interval} after "
        f"{formatting.duration(cost.machine_seconds)} of machine time: {usd}{price}{energy}."
    )


def _describe_best(cost: CostToTarget) -> str:
    if cost.best is None:
        return "it did not measure this metric"
    return f"its best is {formatting.number(cost.best[1])} at step {cost.best[0]:,}"


def _describe_verdict(parity: Parity) -> str:
    is_pass = parity.verdict == "pass"
    metric = _find_worst_metric(
        [metric for metric in parity.metrics if metric.can_resolve_tolerance or not is_pass]
    )
    gap = metric.worst_gap
    difference = format_difference(gap.difference)
    if not is_pass or gap.difference > metric.tolerance:
        verdict = "Pass within noise" if is_pass else parity.verdict.capitalize()
        by = f"by {difference} in {metric.name} at step {gap.step}"
        limit = _describe_limit(parity, metric, gap)
        return f"{verdict}: {parity.candidate} differs from {parity.baseline} {by}; {limit}."
    count = len({gap.step for metric in parity.metrics for gap in metric.gaps})
    evaluations = "the only evaluation" if count == 1 else f"all {count} evaluations"
    if not gap.difference:
        return f"Pass: {parity.candidate} equals {parity.baseline} at {evaluations}."
    tolerance = format_difference(metric.tolerance)
    return (
        f"Pass: {parity.candidate} is within {tolerance} of {parity.baseline} at {evaluations}; "
        f"the largest difference is {metric.name}, {difference} at step {gap.step}."
    )


def _describe_coarse_metrics(parity: Parity) -> list[str]:
    """Return a sentence on metrics not covered by a pass: too few items for the tolerance."""
    coarse = [
        metric
        for metric in parity.metrics
        if not metric.can_resolve_tolerance and metric.worst_gap.difference
    ]
    if parity.verdict != "pass" or not coarse:
        return []
    metric = _find_worst_metric(coarse)
    gap = metric.worst_gap
    difference = f"{metric.name} differs by {format_difference(gap.difference)} at step {gap.step}"
    return [f"{difference}; {_describe_resolution(metric, gap)}, too coarse to judge it."]


def _find_worst_metric(metrics: Sequence[MetricComparison]) -> MetricComparison:
    return max(metrics, key=lambda metric: metric.limit_ratio(metric.worst_gap))


def _describe_limit(parity: Parity, metric: MetricComparison, gap: Gap) -> str:
    """Return the limit for a gap: tolerance, noise or the weight of one item."""
    limit = metric.limit(gap)
    if limit == metric.tolerance:
        return f"the tolerance is {format_difference(limit)}"
    if limit == value_at(metric.noise, gap.step):
        return f"repeats of {parity.baseline} differ by {format_difference(limit)}"
    return _describe_resolution(metric, gap)


def _describe_resolution(metric: MetricComparison, gap: Gap) -> str:
    share = format_difference(metric.resolution(gap))
    return f"one of {metric.num_items or 0:,.0f} items is {share}"


def _describe_blocking(parity: Parity) -> str:
    return (
        f"Inconclusive: {parity.baseline} and {parity.candidate} are not comparable; "
        f"they differ in {format_differences(parity.blocking_differences)}."
    )


def format_differences(differences: Sequence[SettingDifference]) -> str:
    """Return the first differences with both values, and how many others there are."""
    shown = [
        f"{item.key} ({format_setting(item.baseline)}, {format_setting(item.candidate)})"
        for item in differences[:MAX_NAMED_DIFFERENCES]
    ]
    num_more = len(differences) - MAX_NAMED_DIFFERENCES
    return ", ".join(shown) + (f" and {num_more} more" if num_more > 0 else "")


def format_difference(difference: float) -> str:
    """Return a relative difference in percent, with two significant digits."""
    return f"{100 * difference:.2g}%"


def format_setting(value: object) -> str:
    """Return a setting's value, with long hashes shortened."""
    if value is None:
        return "unset"
    text = str(value)
    return f"{text[:SHOWN_HASH_CHARACTERS]}…" if _HASH.fullmatch(text) else text
