"""Section of a report on one evaluated model by class: its metrics and its confusion matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.evaluation.report.drawing import Chart, ChartContext, draw_matrix
from regauge.run_folders import formatting

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.run_folders.run_folder import RunFolder
    from regauge.tasks import ClassMetrics

MAX_ROWS = 50
"""Classes that a report shows; the most frequent ones come first."""
MAX_DRAWN_CLASSES = 40
"""Classes up to which the confusion matrix is drawn."""


@dataclass(frozen=True)
class ClassesSection:
    """The quality of one model by class."""

    title: str
    rows: tuple[dict[str, str], ...]
    """Class, precision, recall, F1 and support."""
    note: str
    """The classes that are left out; empty if all are shown."""
    names: tuple[str, ...]
    """Names of the classes of the confusion matrix."""
    matrix: tuple[tuple[int, ...], ...]
    """Numbers of rows, [actual class, predicted class]; empty if there is none to draw."""


def build_classes_sections(runs: Iterable[RunFolder]) -> tuple[ClassesSection, ...]:
    """Return one section for each model of an evaluation, or for each held-out set of a run."""
    reports = ((run, *item) for run in runs for item in run.class_reports.items())
    sections = []
    for run, name, report in reports:
        classes = report["classes"]
        if not classes:
            continue
        shown = sorted(classes, key=lambda row: -row["support"]) if _is_long(classes) else classes
        matrix = report.get("confusion_matrix") or []
        is_drawn = len(matrix) <= MAX_DRAWN_CLASSES
        sections.append(
            ClassesSection(
                title=f"Classes: {run.name}, {name}",
                rows=tuple(map(_format_row, shown[:MAX_ROWS])),
                note=f"The {MAX_ROWS} most frequent of {len(classes)} classes."
                if _is_long(classes)
                else "",
                names=tuple(row["name"] for row in classes),
                matrix=tuple(map(tuple, matrix)) if is_drawn else (),
            )
        )
    return tuple(sections)


def build_charts(section: ClassesSection, context: ChartContext) -> tuple[Chart, ...]:
    """Return the confusion matrix as a picture; empty if there is none to draw."""
    if not section.matrix:
        return ()
    cells = [list(row) for row in section.matrix]
    return (draw_matrix("Confusion matrix", section.names, cells, context),)


def _is_long(classes: list[ClassMetrics]) -> bool:
    return len(classes) > MAX_ROWS


def _format_row(row: ClassMetrics) -> dict[str, str]:
    metrics = {"precision": row["precision"], "recall": row["recall"], "F1": row["f1"]}
    numbers = {name: formatting.number(value) for name, value in metrics.items()}
    return {"class": row["name"], **numbers, "support": f"{row['support']:,}"}
