"""The table of an evaluation: rows are what was measured, columns are metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import isfinite
from typing import Any

from regauge.results import formatting

LOWER_IS_BETTER = ("loss", "perplexity", "error", "seconds", "latency", "usd", "bytes")
"""A metric with one of these in its name is best where it is smallest."""


@dataclass(frozen=True)
class Table:
    """One evaluation; a row without a metric has None there."""

    title: str
    metrics: tuple[str, ...]
    """Those that most rows have come first."""
    names: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    """[row, metric]"""
    notes: tuple[str, ...]

    def best(self, metric: str) -> float | None:
        """Return the best value of a metric; None where no two rows differ in it."""
        values = [value for _, value in self._ranked(metric)]
        return values[0] if len(set(values)) > 1 else None

    def bests(self) -> list[tuple[str, str, float]]:
        """Return (metric, name of the row, value) of each metric in which rows differ."""
        return [
            (metric, self._ranked(metric)[0][0], best)
            for metric in self.metrics
            if (best := self.best(metric)) is not None
        ]

    def sentences(self) -> list[str]:
        """Return one sentence for each metric: who leads, and by how much."""
        lines: list[str] = []
        for metric, name, value in self.bests():
            other, second = self._ranked(metric)[1]
            if second == value:
                lines.append(f"{metric}: {name} and {other} lead with {formatting.number(value)}.")
                continue
            lines.append(
                f"{metric}: {name} leads with {formatting.number(value)}, "
                f"{formatting.number(abs(value - second))} ahead of {other} "
                f"({formatting.number(second)})."
            )
        return lines

    def _ranked(self, metric: str) -> list[tuple[str, float]]:
        place = self.metrics.index(metric)
        pairs = zip(self.names, (row[place] for row in self.values), strict=True)
        finite = [(name, value) for name, value in pairs if value is not None and isfinite(value)]
        return sorted(finite, key=lambda pair: pair[1], reverse=not lower_is_better(metric))


def lower_is_better(metric: str) -> bool:
    """Return whether a smaller value of a metric is the better one."""
    return any(word in metric.lower() for word in LOWER_IS_BETTER)


def table(document: dict[str, Any]) -> Table:
    """Return the table of an `evaluation.json`."""
    rows: list[dict[str, Any]] = document.get("rows", [])
    counts = Counter(key for row in rows for key, value in row.items() if _is_number(value))
    metrics = tuple(key for key, _ in counts.most_common())
    return Table(
        title=document.get("title", "Evaluation"),
        metrics=metrics,
        names=tuple(str(row.get("name", "")) for row in rows),
        values=tuple(
            tuple(row[key] if _is_number(row.get(key)) else None for key in metrics) for row in rows
        ),
        notes=tuple(str(note) for note in document.get("notes", [])),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
