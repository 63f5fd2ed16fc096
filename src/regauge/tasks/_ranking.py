"""Rows of candidates as arrays, padded to the most that a row has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from regauge.data.batches import Found
    from regauge.data.dataset import Field


def table(found: Found, members: int, names: tuple[str, ...], missing: np.generic) -> np.ndarray:
    """Return fields as [rows, candidates, fields], of the type of what stands for a missing one."""
    result = np.full((len(found), members, len(names)), missing)
    for cells, row in zip(result, found, strict=True):
        if row is not None:
            for place, name in enumerate(names):
                cells[: len(row[name]), place] = row[name]
    return result


def present(found: Found, members: int, name: str) -> np.ndarray:
    """Return which candidates are there, [rows, candidates] fp32."""
    counts = np.array([0 if row is None else len(row[name]) for row in found])
    return (np.arange(members) < counts[:, None]).astype(np.float32)


def scale(field: Field) -> tuple[float, float]:
    """Return the mean and the deviation that a feature is normalised by."""
    return field.mean or 0.0, field.deviation or 1.0


def longest(histograms: list[np.ndarray]) -> tuple[int, ...]:
    """Return how many rows have each length as their longest text, if texts met at random.

    Every length that one of the texts has counts at least once.
    """
    size = max([2, *(len(counts) for counts in histograms)])
    below = np.ones(size)
    occurs = np.zeros(size, bool)
    rows = 0.0
    for counts in histograms:
        wide = np.zeros(size)
        wide[: len(counts)] = counts
        rows = max(rows, wide.sum())
        below *= np.cumsum(wide) / max(wide.sum(), 1)
        occurs |= wide > 0
    found = np.rint(np.diff(below, prepend=0.0) * rows)
    return tuple(np.where(occurs, np.maximum(found, 1), 0).astype(np.int64).tolist())
