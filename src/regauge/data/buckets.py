"""The declared shapes of a run: the few lengths that batches are padded to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

MULTIPLE = 8
"""Lengths of a ladder are multiples of this, as matrix units like them."""


def ladder(histogram: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return at most `most` lengths that cover a histogram with the least padding.

    Entry i of the histogram counts texts of i tokens. Exact, by dynamic programming over the
    multiples of eight: the cost of a rung is its length times the texts that it takes.
    """
    rungs, counts = _rungs(histogram)
    covered = np.concatenate([[0], np.cumsum(counts)])
    size = len(rungs)
    cost = np.full((most + 1, size + 1), np.inf)
    cost[:, 0] = 0
    came_from = np.zeros((most + 1, size + 1), np.int64)
    for used in range(1, most + 1):
        for top in range(1, size + 1):
            options = cost[used - 1, :top] + (covered[top] - covered[:top]) * rungs[top - 1]
            came_from[used, top] = int(options.argmin())
            cost[used, top] = options.min()
    chosen, top, used = [], size, most
    while top > 0:
        chosen.append(int(rungs[top - 1]))
        top, used = int(came_from[used, top]), used - 1
    return tuple(reversed(chosen))


def real_share(histogram: tuple[int, ...], rungs: tuple[int, ...]) -> float:
    """Return the share of real tokens where each text of a histogram is padded to its rung."""
    real = sum(length * count for length, count in enumerate(histogram))
    slots = sum(fit(length, rungs) * count for length, count in enumerate(histogram) if count)
    return real / max(slots, 1)


def added(histograms: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    """Return the sum of histograms, as long as the longest of them."""
    total = np.zeros(max(map(len, histograms), default=0), np.int64)
    for counts in histograms:
        total[: len(counts)] += np.asarray(counts, np.int64)
    return total


def fit(length: int, rungs: tuple[int, ...]) -> int:
    """Return the smallest rung that holds a length."""
    return next(rung for rung in rungs if rung >= length)


def _rungs(histogram: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the possible rungs that hold texts, and how many texts end in each."""
    longest = max([1, *(length for length, count in enumerate(histogram) if count)])
    rungs = np.arange(MULTIPLE, longest + MULTIPLE, MULTIPLE)
    counts = np.zeros(len(rungs), np.int64)
    for length, count in enumerate(histogram):
        if count:
            counts[max(0, -(-length // MULTIPLE) - 1)] += count
    keep = counts > 0
    keep[-1] = True
    return rungs[keep], counts[keep]
