"""Sections of a report that compare runs with the baseline. No markup, no charts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.evaluation.compare import sentences
from regauge.evaluation.compare.cost import rank_by_cost
from regauge.run_folders import formatting

if TYPE_CHECKING:
    from regauge.evaluation.compare.compare import ComparisonResult, DivergenceSummary
    from regauge.evaluation.compare.cost import CostToTarget
    from regauge.evaluation.compare.gaps import Gap, MetricComparison
    from regauge.evaluation.compare.verdict import Parity

LIMIT_NOTE = (
    "The allowed difference is the largest of the tolerance, the run-to-run noise and, for a "
    "metric that counts items, the change by six items (sign test, p = 3%)."
)
Row = dict[str, str | bool]
MAX_EVALUATIONS = 12
"""Most evaluations in a table; the ones with the largest differences are kept."""


@dataclass(frozen=True)
class ComparisonSection:
    """Comparison of one run with the baseline, formatted."""

    baseline: str
    candidate: str
    verdict: str
    sentences: tuple[str, ...]
    rows: tuple[Row, ...]
    """Metric, step, both values, difference and limit of each evaluation."""
    num_omitted: int
    """Number of evaluations with smaller differences that are not in the rows."""
    setting_differences: tuple[tuple[str, str, str], ...]
    """(key, value of the baseline, value of the candidate) of the settings that differ."""
    divergence: DivergenceSummary | None
    """First divergence of a recomputed step; None if no step was recomputed."""


def build_comparison_sections(comparison: ComparisonResult) -> tuple[ComparisonSection, ...]:
    """Return one section per run that is compared with the baseline."""
    divergences = {divergence.run: divergence for divergence in comparison.divergences}
    return tuple(
        _build_section(parity, divergences.get(parity.candidate)) for parity in comparison.parities
    )


def build_cost_rows(comparison: ComparisonResult) -> tuple[Row, ...]:
    """Return the cost of each run up to the target; empty without a target."""
    ranking = rank_by_cost(comparison.costs)
    cheapest = ranking[0].run if len(ranking) > 1 else None
    return tuple(_build_cost_row(cost, cheapest) for cost in comparison.costs)


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
