"""Hybrid sharding: spread inside of a group, repeated over the groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from regauge.strategies import MemoryEstimate, ParamSpec, ShardedModel, Site, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from regauge.processes import World


class Hsdp(Strategy):
    """FSDP2 on a mesh of two dimensions: replicas x shards."""

    recomputes: ClassVar[bool] = True

    shards: int = Field(default=2, ge=2)
    """Processes that share one copy of the model; usually those of one machine."""

    def obstacle(self, world: World, optimizer: str, *, lazy: bool = False) -> str | None:
        from regauge.strategies._sharded import obstacle

        if found := obstacle(optimizer, lazy=lazy):
            return found
        if world.size % self.shards or world.size < 2 * self.shards:
            return f"{world.size} processes do not form two or more groups of {self.shards}"
        return None

    def estimate_memory(
        self, weights: Mapping[str, ParamSpec], processes: int, itemsize: int
    ) -> MemoryEstimate:
        from regauge.strategies._sharded import estimate_memory

        del processes
        return estimate_memory(weights, self.shards, itemsize)

    def prepare(self, module: nn.Module, site: Site) -> ShardedModel:
        from regauge.strategies._sharded import SHARD, Sharded, mesh

        shape = (site.world.size // self.shards, self.shards)
        groups = mesh(site, shape, ("replicate", SHARD))
        return Sharded(module, site, groups, reshard_after_forward=True)
