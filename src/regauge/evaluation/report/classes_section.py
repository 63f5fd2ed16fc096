"""Report section on one evaluated model by class: metrics and confusion matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.evaluation.report.charts import Chart, MatrixChart
from regauge.run_folders import formatting

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.run_folders.run_folder import RunFolder
    from regauge.tasks import ClassMetrics, ClassReport

MAX_ROWS = 50
"""Classes shown in a report, most frequent first."""
MAX_DRAWN_CLASSES = 40
"""Largest class count for which the confusion matrix is drawn."""


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
