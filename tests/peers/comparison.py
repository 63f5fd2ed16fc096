"""Comparison of outputs with those of another library for the same texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

TOLERANCE = 2e-5
"""Largest difference relative to the largest number: two layers of fp32 sums in another order.

One token, position or mask more or less changes outputs of these models by more than 1 %.
"""
MIN_SPREAD = 1e-2
"""Smallest spread of outputs over texts, relative to the largest number: they differ by text."""


def compute_in_batches(
    compute: Callable[..., np.ndarray], size: int, *columns: Sequence[str]
) -> np.ndarray:
    """Return the outputs of texts or pairs that are computed in batches of a size."""
    batches = zip(*(split_batches(column, size) for column in columns), strict=True)
    return np.concatenate([compute(*batch) for batch in batches])


def check_equal(outputs: Any, expected: np.ndarray) -> None:
    """Compare outputs with the expected ones, [texts, width]; those must depend on the text."""
    largest = np.abs(expected).max()
    assert np.ptp(expected, axis=0).max() > MIN_SPREAD * largest
    errors = np.abs(np.asarray(outputs) - expected).max(1) / largest
    assert errors.max() < TOLERANCE, f"text {errors.argmax()} differs by {errors.max():.2g}"


def split_batches(texts: Sequence[str], size: int) -> list[list[str]]:
    """Return texts in batches of a size."""
    return [list(texts[start : start + size]) for start in range(0, len(texts), size)]
