"""Optimizer moments per weight; this module imports no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

Axes = tuple[int, ...]
MATRIX: Axes = (0, 1)
VECTOR: Axes = (0,)
MOMENT_AXES: dict[str, dict[int, tuple[Axes, ...]]] = {
    "adamw": {1: (VECTOR, VECTOR), 2: (MATRIX, MATRIX)},
    "lamb": {1: (VECTOR, VECTOR), 2: (MATRIX, MATRIX)},
    "sgd": {1: (VECTOR,), 2: (MATRIX,)},
    "adafactor": {1: (VECTOR,), 2: ((0,), (1,))},
}
"""Optimizer kind -> for a vector or a matrix, the axes kept by each moment."""


def count_moments(kind: str, shapes: Iterable[tuple[int, ...]]) -> int:
    """Count the moment values that an optimizer keeps for weights of these shapes.

    A weight with more axes counts as a matrix: the last axis, and all others.
    """
    flat = ((math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else shape for shape in shapes)
    return sum(
        math.prod(shape[axis] for axis in axes)
        for shape in flat
        for axes in MOMENT_AXES[kind][len(shape)]
    )
