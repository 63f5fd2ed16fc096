"""Arrays for ranking rows, with candidates padded to the maximum number per row."""

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
    """Return the mean and standard deviation that normalize a feature."""
    return field.mean or 0.0, field.std or 1.0
