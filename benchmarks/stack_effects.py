"""Predicts the constants of a software stack from those of others, by what they have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from regauge.planner.calibration import MemoryConstants, StackConstants

EFFECTS = {"all": 0.02, "family": 0.3, "chip": 0.01, "kind": 0.1, "source": 0.01, "stack": 0.03}
MEMORY_EFFECTS = {"all": 0.08, "source": 0.03, "stack": 0.03}
"""Assumed variance of the logarithm of a constant, by what two stacks have in common."""
STACK_VARIANCE, ROW_VARIANCE = 0.02, 0.1
"""Assumed variance of a fitted constant around these effects; the second is divided by the rows."""
MIN_VARIANCE = 0.01
"""Variance of a stack that no number of other stacks removes."""
UNSHARED = ("fixed_seconds",)
"""Constants that say nothing of another stack."""


def predict_constants(
    labels: Sequence[Mapping[str, str]],
    target: Mapping[str, str],
    entries: Sequence[StackConstants] | Sequence[MemoryConstants],
    prior: Mapping[str, tuple[float, float]],
    effects: Mapping[str, float] = EFFECTS,
) -> dict[str, tuple[float, float]]:
    """Return median and log standard deviation of each constant of `prior`.

    A constant is the product of log-normal effects: the best linear unbiased prediction. `labels`
    and `target` name the effects of the entries and of the predicted stack.
    """
    covariance = np.array([[_covary(a, b, effects) for b in labels] for a in labels])
    noise = np.diag([STACK_VARIANCE + ROW_VARIANCE / entry.rows for entry in entries])
    cross = np.array([_covary(target, label, effects) for label in labels])
    weights = np.linalg.solve(covariance + noise, cross) if entries else np.zeros(0)
    total = sum(effects.values())
    share = math.sqrt(max(total - float(weights @ cross), MIN_VARIANCE) / total)
    predicted = {}
    for name, (median, width) in prior.items():
        if name in UNSHARED:
            predicted[name] = (median, width)
            continue
        values = np.log([getattr(entry, name) / median for entry in entries])
        predicted[name] = (median * math.exp(float(weights @ values)), width * share)
    return predicted


def _covary(
    first: Mapping[str, str], second: Mapping[str, str], effects: Mapping[str, float]
) -> float:
    """Return the covariance of the logarithms of a constant of two stacks."""
    return sum(size for name, size in effects.items() if first[name] == second[name])
