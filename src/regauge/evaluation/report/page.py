"""Report content: results first, then each run. No markup, no charts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.evaluation.compare.verdict import heldout_metrics
from regauge.evaluation.report import benchmarks
from regauge.evaluation.report.charts import Chart, MatrixChart
from regauge.evaluation.report.comparison_section import RunComparison, build_run_comparison
from regauge.evaluation.report.figures import KeyFigure
from regauge.evaluation.report.run_section import Environment, RunSection, build_run_section
from regauge.run_folders import formatting
from regauge.run_folders.evaluation_table import EvaluationTable, build_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.evaluation.compare.compare import ComparisonResult
    from regauge.evaluation.report.benchmark_section import BenchmarkSection
    from regauge.run_folders.run_folder import RunFolder
    from regauge.tasks import ClassMetrics, ClassReport

MAX_ROWS = 50
"""Classes shown in a report, most frequent first."""
MAX_DRAWN_CLASSES = 40
"""Largest class count for which the confusion matrix is drawn."""


@dataclass(frozen=True)
class Report:
    title: str
    summary: tuple[str, ...]
    """Results in sentences, the most important first."""
    figures: tuple[KeyFigure, ...]
    """Key figures over all runs."""
    tables: tuple[EvaluationTable, ...]
    run_sections: tuple[RunSection, ...]
    benchmarks: tuple[BenchmarkSection, ...] = ()
    """Benchmarks of training, then artifacts, then servers."""
    comparison: RunComparison | None = None
    """Comparison with a baseline, if requested."""

    @property
    def class_sections(self) -> tuple[ClassesSection, ...]:
        """One section per model with evaluated classes."""
        return build_classes_sections(section.run for section in self.run_sections)

    @property
    def training_sections(self) -> tuple[RunSection, ...]:
        """Sections on the runs with a ledger or metrics."""
        return tuple(
            section for section in self.run_sections if section.run.ledger or section.run.series
        )

    @property
    def environments(self) -> list[tuple[Environment, str]]:
        """Each environment once, with the run names."""
        names: dict[Environment, list[str]] = {}
        for section in self.run_sections:
            if section.environment:
                names.setdefault(section.environment, []).append(section.run.name)
        return [(environment, ", ".join(runs)) for environment, runs in names.items()]


def build_report(
    runs: tuple[RunFolder, ...],
    title: str | None = None,
    comparison: ComparisonResult | None = None,
) -> Report:
    """Return the report on runs in the given order, and on a comparison if there is one."""
    tables = tuple(build_table(run.evaluation) for run in runs if run.evaluation)
    run_sections = tuple(build_run_section(run) for run in runs)
    benchmark_sections = benchmarks.build_sections(runs)
    compared = build_run_comparison(comparison) if comparison else None
    return Report(
        title=title or _build_title(runs, comparison),
        summary=(
            *(compared.summary if compared else ()),
            *_describe_results(tables, run_sections),
            *(sentence for section in benchmark_sections for sentence in section.summary),
        ),
        figures=_build_key_figures(tables, run_sections),
        tables=tables,
        run_sections=run_sections,
        benchmarks=benchmark_sections,
        comparison=compared,
    )


def _build_title(runs: tuple[RunFolder, ...], comparison: ComparisonResult | None) -> str:
    if comparison is not None and comparison.runs == runs:
        return " vs. ".join(run.name for run in runs)
    if len(runs) == 1:
        return runs[0].name
    parents = {run.folder.resolve().parent.name for run in runs}
    return parents.pop() if len(parents) == 1 else ", ".join(run.name for run in runs)


def _describe_results(
    tables: tuple[EvaluationTable, ...], run_sections: tuple[RunSection, ...]
) -> tuple[str, ...]:
    lines = [sentence for table in tables for sentence in table.leader_sentences()]
    unfinished = [
        section
        for section in run_sections
        if section.run.step is not None and not section.run.outcome
    ]
    if not lines:
        lines = [line for section in run_sections for line in _describe_heldout(section.run)]
    lines += [f"{section.run.name}: {section.state}." for section in unfinished]
    for section in unfinished:
        lines += [f"{section.run.name}: {failure.sentence}" for failure in section.failures[-1:]]
    return tuple(lines)


def _describe_heldout(run: RunFolder) -> list[str]:
    """Return how each held-out metric changed up to the final model's step."""
    changed, unchanged = [], []
    model_step = math.inf if run.model_step is None else run.model_step
    for name, points in heldout_metrics(run).items():
        series = [(step, value) for step, value in points if step <= model_step] or points
        (first_step, first), (last_step, last) = series[0], series[-1]
        if len(series) > 1 and formatting.number(first) != formatting.number(last):
            interval = f"between steps {first_step} and {last_step}"
            change = formatting.change(first, last)
            changed.append(f"{run.name}: {name} changed {change} {interval}.")
        elif len(series) > 1:
            unchanged.append(f"{name} {formatting.number(last)}")
    return [*changed, *([f"{run.name}: unchanged: {', '.join(unchanged)}."] if unchanged else [])]


def _build_key_figures(
    tables: tuple[EvaluationTable, ...], run_sections: tuple[RunSection, ...]
) -> tuple[KeyFigure, ...]:
    best = [
        KeyFigure(f"best {metric}", formatting.number(value), name)
        for table in tables[-1:]
        for metric, name, value in table.best_rows()[:2]
    ]
    seconds = [section.seconds for section in run_sections if section.seconds is not None]
    ledgers = [section.run.ledger for section in run_sections if section.run.ledger]
    totals = [KeyFigure("wall-clock time", formatting.duration(sum(seconds)))] if seconds else []
    if ledgers:
        tokens = sum(ledger.get("tokens") or 0 for ledger in ledgers)
        totals.append(
            KeyFigure("real tokens trained on", formatting.count(tokens), "without padding")
        )
        totals.append(_build_cost_figure(run_sections))
    return (*best, *totals)


def _build_cost_figure(run_sections: tuple[RunSection, ...]) -> KeyFigure:
    costs: list[tuple[str, float | None]] = [
        (section.run.name, section.run.ledger.get("usd"))
        for section in run_sections
        if section.run.ledger
    ]
    unpriced = [name for name, usd in costs if usd is None]
    if unpriced:
        return KeyFigure("cost", formatting.UNKNOWN, f"no price is set for {', '.join(unpriced)}")
    total = sum(usd for _, usd in costs if usd is not None)
    return KeyFigure("cost", formatting.dollars(total), "over all attempts")


@dataclass(frozen=True)
class ClassesSection:
    """One model's quality by class."""

    title: str
    rows: tuple[dict[str, str], ...]
    """Class, precision, recall, F1 and support."""
    note: str
    """Omitted classes; empty if all are shown."""
    names: tuple[str, ...]
    """Class names in the confusion matrix."""
    matrix: tuple[tuple[int, ...], ...]
    """Row counts, [actual class, predicted class]; empty without a matrix to draw."""

    @property
    def charts(self) -> tuple[Chart, ...]:
        """The confusion matrix; empty without one to draw."""
        chart = MatrixChart("Confusion matrix", self.names, self.matrix)
        return (chart,) if self.matrix else ()


def build_classes_sections(runs: Iterable[RunFolder]) -> tuple[ClassesSection, ...]:
    """Return one section per model in an evaluation, or per held-out set in a run."""
    return tuple(
        _build_section(f"Classes: {run.name}, {name}", report)
        for run in runs
        for name, report in run.class_reports.items()
        if report["classes"]
    )


def _build_section(title: str, report: ClassReport) -> ClassesSection:
    classes = shown = report["classes"]
    note = ""
    if len(classes) > MAX_ROWS:
        shown = sorted(classes, key=lambda row: -row["support"])[:MAX_ROWS]
        note = f"The {MAX_ROWS} most frequent of {len(classes)} classes."
    matrix = report.get("confusion_matrix") or []
    return ClassesSection(
        title=title,
        rows=tuple(map(_format_row, shown)),
        note=note,
        names=tuple(row["name"] for row in classes),
        matrix=tuple(map(tuple, matrix)) if len(matrix) <= MAX_DRAWN_CLASSES else (),
    )


def _format_row(row: ClassMetrics) -> dict[str, str]:
    metrics = {"precision": row["precision"], "recall": row["recall"], "F1": row["f1"]}
    numbers = {name: formatting.number(value) for name, value in metrics.items()}
    return {"class": row["name"], **numbers, "support": f"{row['support']:,}"}
