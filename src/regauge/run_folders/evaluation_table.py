"""Evaluation result tables: one row per model or baseline, one column per metric."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from regauge.run_folders import formatting
from regauge.tasks import find_direction

if TYPE_CHECKING:
    from regauge.tasks import Direction


@dataclass(frozen=True)
class EvaluationTable:
    """One evaluation's results; a missing value is None."""

    title: str
    metrics: tuple[str, ...]
    """Metric names; those that most rows have come first."""
    names: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    """[rows, metrics]"""
    notes: tuple[str, ...]
    directions: dict[str, Direction]
    """Metric -> direction; other metrics do not have a best value."""

    def best_value(self, metric: str) -> float | None:
        """Return a metric's best value; None without one, or if all rows have the same."""
        if metric not in self.directions:
            return None
        values = [value for _, value in self._rank_rows(metric)]
        return values[0] if len(set(values)) > 1 else None

    def best_rows(self) -> list[tuple[str, str, float]]:
        """Return (metric, best row name, value) for each metric in which rows differ."""
        return [
            (metric, self._rank_rows(metric)[0][0], best)
            for metric in self.metrics
            if (best := self.best_value(metric)) is not None
        ]

    def leader_sentences(self) -> list[str]:
        """Return one sentence per metric: which row leads, and by how much."""
        lines: list[str] = []
        for metric, name, value in self.best_rows():
            runner_up, second = self._rank_rows(metric)[1]
            if second == value:
                leaders = f"{name} and {runner_up}"
                lines.append(f"{metric}: {leaders} lead with {formatting.number(value)}.")
                continue
            lines.append(
                f"{metric}: {name} leads with {formatting.number(value)}, "
                f"{formatting.number(abs(value - second))} ahead of {runner_up} "
                f"({formatting.number(second)})."
            )
        return lines

    def _rank_rows(self, metric: str) -> list[tuple[str, float]]:
        """Return (name, value) for rows with a finite value, best first."""
        column = self.metrics.index(metric)
        pairs = zip(self.names, (row[column] for row in self.values), strict=True)
        finite = [(name, value) for name, value in pairs if value is not None and isfinite(value)]
        return sorted(finite, key=lambda pair: pair[1], reverse=self.directions[metric] == "max")


def build_table(document: dict[str, Any]) -> EvaluationTable:
    rows: list[dict[str, Any]] = document.get("rows", [])
    counts = Counter(key for row in rows for key, value in row.items() if _is_number(value))
    metrics = tuple(key for key, _ in counts.most_common())
    return EvaluationTable(
        title=document.get("title", "Evaluation"),
        metrics=metrics,
        names=tuple(str(row.get("name", "")) for row in rows),
        values=tuple(
            tuple(row[key] if _is_number(row.get(key)) else None for key in metrics) for row in rows
        ),
        notes=tuple(str(note) for note in document.get("notes", [])),
        directions={
            metric: direction
            for metric in metrics
            if (direction := find_direction(metric, document.get("directions", {})))
        },
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
