"""ZeRO stage 1 (Rajbhandari et al., 2020): master weights and moments are sharded.

Each process owns whole parameters, balanced by size, so every optimizer runs on them
unchanged. Module parameters and gradients are on every process.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from regauge.training.strategies import (
    MemoryEstimate,
    Placement,
    ShardedModel,
    Shards,
    Strategy,
    Transfer,
    UpdateTraffic,
    estimate_replica,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from regauge.models.weight_shapes import ParamSpec

PARTITION_BYTES = 500e6
"""Bytes per message in DeepSpeed's ZeRO, whose published runs calibrate the planner."""


class Zero1(Strategy):
    """Each process updates its own parameters and broadcasts them."""

    peer_names: ClassVar[tuple[str, ...]] = ("zero", "deepspeed", "deepspeed_stage_1")

    complexity: ClassVar[int] = 2

    bucket_mib: int = Field(default=25, ge=1)
    """Gradient bucket size per reduction."""

    def count_shards(self, processes: int) -> Shards:
        return Shards(optimizer=processes)

    def communication(self, traffic: UpdateTraffic) -> tuple[Transfer, ...]:
        """Return an all-gather for each pass, and one for the updated weights."""
        messages = traffic.gradients / PARTITION_BYTES
        return (Transfer("all_gather", traffic.gradients, messages, traffic.passes + 1),)

    def estimate_memory(
        self, weights: Mapping[str, ParamSpec], processes: int, itemsize: int
    ) -> MemoryEstimate:
        sizes = {
            name: math.prod(spec.shape) for name, spec in weights.items() if spec.requires_grad
        }
        owners = assign_owners(sizes, processes)
        loads = [0] * processes
        for name, owner in owners.items():
            loads[owner] += sizes[name]
        fullest = loads.index(max(loads))
        owned = {name for name, owner in owners.items() if owner == fullest}
        return estimate_replica(weights, itemsize, owned)

    def prepare(self, module: nn.Module, placement: Placement) -> ShardedModel:
        from regauge.training.strategies._replica import ReplicatedModel

        parameters = module.named_parameters()
        sizes = {name: value.numel() for name, value in parameters if value.requires_grad}
        owner_of = assign_owners(sizes, placement.world.size).__getitem__
        return ReplicatedModel(module, placement, bucket_mib=self.bucket_mib, owner_of=owner_of)


def assign_owners(sizes: dict[str, int], processes: int) -> dict[str, int]:
    """Parameter -> owner rank, from the numbers of elements by name.

    The largest parameters are assigned first, each to the least loaded process.
    """
    loads = [(0, owner) for owner in range(processes)]
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, owners[name] = loads[0]
        heapq.heapreplace(loads, (load + sizes[name], owners[name]))
    return owners
