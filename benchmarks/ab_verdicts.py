"""Verdicts about the speed of two commits: ratios, their range, the table and the exit code.

A round measures both commits one after the other, so its ratio is free of slow changes of the
machine. This file reads no clock and starts nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Any, Literal

LIMIT = 1.15
"""Largest accepted ratio of the times, new / base."""
LOOK_AGAIN = 1.08
"""Ratio above which a workload is measured again before its verdict."""
TAIL_PROBABILITY = 0.01
"""Probability on each side that the median of all possible rounds is outside of the range."""
MILLI = 1e-3

SAME, SLOWER, UNKNOWN, BROKEN_BASE = 0, 1, 2, 3
"""Exit codes: nothing is slower, a workload is slower, one has no result, the base cannot run."""

Verdict = Literal["ok", "slower", "not measured"]


@dataclass
class Comparison:
    """The rounds of one workload."""

    name: str
    unit: str
    """Unit of work that a time belongs to, such as a step."""
    min_rounds: int
    """Rounds that prove that it is slower; the first start of its programs has fewer."""
    rounds: list[tuple[float, float]] = field(default_factory=list)
    """Seconds per unit of each round: base, new."""
    problem: str = ""
    """Why it could not be measured; empty if it was."""

    @property
    def ratios(self) -> list[float]:
        """The time of the new commit divided by that of the base, for each round."""
        return [new / base for base, new in self.rounds]

    @property
    def verdict(self) -> Verdict:
        """`slower` if the ratio exceeds the limit, and its range excludes equal times."""
        if self.problem or not self.rounds:
            return "not measured"
        is_slower = statistics.median(self.ratios) > LIMIT and find_range(self.ratios)[0] > 1
        return "slower" if is_slower else "ok"

    @property
    def is_doubtful(self) -> bool:
        """Whether more rounds are needed: it looks slower, and the rounds do not prove it yet."""
        if not self.rounds or statistics.median(self.ratios) <= LOOK_AGAIN:
            return False
        return self.verdict == "ok" or len(self.rounds) < self.min_rounds

    def summarize(self) -> dict[str, Any]:
        """Return the row as a document."""
        document: dict[str, Any] = {"workload": self.name, "unit": f"s/{self.unit}"}
        if self.rounds:
            base, new = zip(*self.rounds, strict=True)
            document |= {
                "ratio": statistics.median(self.ratios),
                "range": find_range(self.ratios),
                "base": statistics.median(base),
                "new": statistics.median(new),
                "rounds": self.rounds,
            }
        return document | {"verdict": self.verdict, "problem": self.problem}


def find_range(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and highest ratio without outliers.

    As many are left out at each end as a 98 % confidence interval of the median permits: none of
    6 rounds, one of 12, two of 16, five of 24.
    """
    count, outliers, ordered = len(ratios), 0, sorted(ratios)
    probability = comb(count, 0) / 2**count
    while True:
        probability += comb(count, outliers + 1) / 2**count
        if probability > TAIL_PROBABILITY:
            return ordered[outliers], ordered[-1 - outliers]
        outliers += 1


def find_exit_code(comparisons: Iterable[Comparison]) -> int:
    """Return SLOWER, UNKNOWN or SAME, in this order of priority."""
    verdicts = {comparison.verdict for comparison in comparisons}
    if "slower" in verdicts:
        return SLOWER
    return UNKNOWN if "not measured" in verdicts or not verdicts else SAME


def format_table(comparisons: Iterable[Comparison]) -> str:
    """Return one line per workload, below a heading."""
    rows: list[tuple[str, ...]] = [
        ("workload", "new/base", "range", "base", "new", "rounds", "verdict")
    ]
    rows += [_format_row(comparison) for comparison in comparisons]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = (
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    )
    return "\n".join(lines)


def _format_row(comparison: Comparison) -> tuple[str, ...]:
    """Return the cells of a workload."""
    if not comparison.rounds:
        reason = f"{comparison.verdict}: {comparison.problem}"
        return (comparison.name, "-", "-", "-", "-", "0", reason)
    base, new = (statistics.median(side) for side in zip(*comparison.rounds, strict=True))
    low, high = find_range(comparison.ratios)
    reason = f": {comparison.problem}" if comparison.problem else ""
    return (
        comparison.name,
        f"{statistics.median(comparison.ratios):.2f}",
        f"{low:.2f} to {high:.2f}",
        _format_seconds(base, comparison.unit),
        _format_seconds(new, comparison.unit),
        str(len(comparison.rounds)),
        comparison.verdict + reason,
    )


def _format_seconds(seconds: float, unit: str) -> str:
    """Return a time per unit, such as `12.3 ms/step`."""
    value, prefix = (seconds, "") if seconds >= 1 else (seconds / MILLI, "m")
    return f"{value:.3g} {prefix}s/{unit}"
