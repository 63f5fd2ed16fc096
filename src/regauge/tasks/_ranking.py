"""Arrays of ranking rows, with candidates padded to the maximum number of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from regauge.data.batches import OptionalRows
    from regauge.data.dataset import ColumnInfo


def build_feature_table(
    rows: OptionalRows, max_candidates: int, names: tuple[str, ...], missing: np.generic
) -> np.ndarray:
    """Return feature columns, [rows, candidates, features], filled up with `missing`.

    The array has the dtype of `missing`.
    """
    table = np.full((len(rows), max_candidates, len(names)), missing)
    for cells, row in zip(table, rows, strict=True):
        if row is not None:
            for column, name in enumerate(names):
                cells[: len(row[name]), column] = row[name]
    return table


def build_candidate_mask(rows: OptionalRows, max_candidates: int, name: str) -> np.ndarray:
    """Return 1 for each candidate and 0 for padding, [rows, candidates] fp32."""
    counts = np.array([0 if row is None else len(row[name]) for row in rows])
    return (np.arange(max_candidates) < counts[:, None]).astype(np.float32)


def feature_scale(field: ColumnInfo) -> tuple[float, float]:
    """Return the mean and the standard deviation that a feature is normalized by."""
    return field.mean or 0.0, field.std or 1.0


def longest_text_histogram(histograms: list[np.ndarray]) -> tuple[int, ...]:
    """Return the expected number of rows by the length of their longest text.

    Text lengths are assumed independent. Every length that occurs counts at least once.
    """
    size = max([2, *(len(counts) for counts in histograms)])
    cumulative = np.ones(size)
    occurs = np.zeros(size, bool)
    num_rows = 0.0
    for counts in histograms:
        extended = np.zeros(size)
        extended[: len(counts)] = counts
        num_rows = max(num_rows, extended.sum())
        cumulative *= np.cumsum(extended) / max(extended.sum(), 1)
        occurs |= extended > 0
    expected = np.rint(np.diff(cumulative, prepend=0.0) * num_rows)
    return tuple(np.where(occurs, np.maximum(expected, 1), 0).astype(np.int64).tolist())
