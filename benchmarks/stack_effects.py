"""Predicts the constants of a software stack from those of others, by what they have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from regauge.planning.calibration import MemoryConstants, StackConstants

EFFECTS = {"all": 0.08, "family": 0.04, "chip": 0.01, "kind": 0.06, "source": 0.03, "stack": 0.03}
"""Assumed variance of the logarithm of a constant, by what two stacks have in common."""
STACK_VARIANCE, ROW_VARIANCE = 0.02, 0.1
"""Assumed variance of a fitted constant around these effects; the second is divided by the rows."""


def predict_constants(
    labels: Sequence[Mapping[str, str]],
    target: Mapping[str, str],
    entries: Sequence[StackConstants] | Sequence[MemoryConstants],
    prior: Mapping[str, tuple[float, float]],
) -> dict[str, tuple[float, float]]:
    """Return median and log standard deviation of each constant of `prior`.

    A constant is the product of log-normal effects: the best linear unbiased prediction. `labels`
    and `target` name the effects of the entries and of the predicted stack.
    """
    covariance = np.array([[_covary(a, b) for b in labels] for a in labels])
    noise = np.diag([STACK_VARIANCE + ROW_VARIANCE / entry.rows for entry in entries])
    cross = np.array([_covary(target, label) for label in labels])
    weights = np.linalg.solve(covariance + noise, cross) if entries else np.zeros(0)
    variance = _covary(target, target) - float(weights @ cross)
    share = math.sqrt(max(variance, 0.01) / sum(EFFECTS.values()))
    predicted = {}
    for name, (median, width) in prior.items():
        values = np.log([getattr(entry, name) / median for entry in entries])
        predicted[name] = (median * math.exp(float(weights @ values)), width * share)
    return predicted


def _covary(first: Mapping[str, str], second: Mapping[str, str]) -> float:
    """Return the covariance of the logarithms of a constant of two stacks."""
    return sum(
        variance
        for name, variance in EFFECTS.items()
        if name in first and first[name] == second[name]
    )
