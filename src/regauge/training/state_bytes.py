"""Bytes for weights, gradients and moments; this module imports no torch.

Dry runs, the batch size finder and the planner measure training states here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from regauge.training.optimizers.moments import count_moments

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.models.weight_shapes import ParamSpec
    from regauge.training.strategies import Strategy

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
