"""Memory for replicated and sharded models, and what cannot be sharded; no torch here.

Memory figures are for the process that holds most.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from regauge.training.strategies import MemoryEstimate, Transfer

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from regauge.models.weight_shapes import ParamSpec
    from regauge.training.strategies import UpdateTraffic

GRADIENT_BYTES = MASTER_BYTES = 4


def list_shard_transfers(
    traffic: UpdateTraffic, group: Literal["all", "inside"] = "all"
) -> tuple[Transfer, ...]:
    """Return the collectives for sharded weights, which each pass gathers twice, layer by layer."""
    return (
        Transfer("all_gather", traffic.weights, traffic.layers, 2 * traffic.passes, group),
        Transfer("reduce_scatter", traffic.gradients, traffic.layers, traffic.passes, group),
    )


def estimate_replica(
    weights: Mapping[str, ParamSpec], itemsize: int, owned: Container[str] | None = None
) -> MemoryEstimate:
    """Estimate the memory of a process that updates the weights with these names, or all."""
    trained = {name: spec for name, spec in weights.items() if spec.requires_grad}
    updated_shapes = [
        spec.shape for name, spec in trained.items() if owned is None or name in owned
    ]
    master_bytes = 0 if itemsize == MASTER_BYTES else MASTER_BYTES
    return MemoryEstimate(
        weights=itemsize * sum(math.prod(spec.shape) for spec in weights.values()),
        master_weights=master_bytes * sum(map(math.prod, updated_shapes)),
        gradients=GRADIENT_BYTES * sum(math.prod(spec.shape) for spec in trained.values()),
        updated_shapes=tuple(updated_shapes),
    )


def estimate_shards(weights: Mapping[str, ParamSpec], shards: int, itemsize: int) -> MemoryEstimate:
    """Estimate the memory of a process that holds each weight's largest shard."""
    local_shapes = {name: _largest_shard(spec.shape, shards) for name, spec in weights.items()}
    updated = [local_shapes[name] for name, spec in weights.items() if spec.requires_grad]
    frozen = [local_shapes[name] for name, spec in weights.items() if not spec.requires_grad]
    return MemoryEstimate(
        weights=MASTER_BYTES * sum(map(math.prod, updated))
        + itemsize * sum(map(math.prod, frozen)),
        master_weights=0,
        gradients=MASTER_BYTES * sum(map(math.prod, updated)),
        updated_shapes=tuple(updated),
    )


def find_sharding_obstacle(optimizer: str, *, lazy: bool) -> str | None:
    """Return why the optimizer or the device cannot use sharded weights, or None."""
    if lazy:
        return "torch's fully_shard does not record its gathers on a lazy device"
    return "torch's Adafactor refuses sharded tensors" if optimizer == "adafactor" else None


def _largest_shard(shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """Return the shape of a weight's largest shard; a scalar is on every process."""
    return (-(-shape[0] // shards), *shape[1:]) if shape else shape
