"""Bytes for weights, gradients and moments; this module imports no torch.

Dry runs, the batch size finder and the planner measure training states here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from regauge.models.weight_shapes import ParamSpec
    from regauge.training.strategies import Strategy

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


BYTES_PER_MOMENT = 4
HALF_PRECISIONS = ("bf16", "fp16", "fp8", "autocast")
"""Precisions with 2-byte values; others have 4. Plans call bf16 autocast."""


class StateBytes(NamedTuple):
    """Bytes on the process that holds most, without activations."""

    weights: int
    master_weights: int
    """fp32 weights stored in addition to the module's."""
    gradients: int
    optimizer_state: int


@dataclass(frozen=True, eq=False)
class RunWeights:
    """Weights by name, and the optimizer."""

    specs: Mapping[str, ParamSpec]
    optimizer: str

    @property
    def num_trained(self) -> int:
        return sum(math.prod(spec.shape) for spec in self.specs.values() if spec.requires_grad)

    def measure(self, strategy: Strategy, processes: int, precision: str) -> StateBytes:
        return _measure(self, strategy, processes, 2 if precision in HALF_PRECISIONS else 4)


@lru_cache(maxsize=1024)
def _measure(weights: RunWeights, strategy: Strategy, processes: int, itemsize: int) -> StateBytes:
    memory = strategy.estimate_memory(weights.specs, processes, itemsize)
    moments = count_moments(weights.optimizer, memory.updated_shapes)
    return StateBytes(
        memory.weights, memory.master_weights, memory.gradients, BYTES_PER_MOMENT * moments
    )
