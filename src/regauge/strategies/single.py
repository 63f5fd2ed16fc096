"""One process, the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.strategies import MemoryEstimate, ParamSpec, ShardedModel, Site, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from regauge.processes import World

ONE_BUCKET_MIB = 1 << 20


class Single(Strategy):
    """A run of one process."""

    def obstacle(self, world: World, optimizer: str, *, lazy: bool = False) -> str | None:
        del optimizer, lazy
        return None if world.size == 1 else f"it is for 1 process, this run has {world.size}"

    def estimate_memory(
        self, weights: Mapping[str, ParamSpec], processes: int, itemsize: int
    ) -> MemoryEstimate:
        from regauge.strategies._replica import estimate_memory

        del processes
        return estimate_memory(weights, itemsize)

    def prepare(self, module: nn.Module, site: Site) -> ShardedModel:
        from regauge.strategies._replica import Replica

        return Replica(module, site, bucket_mib=ONE_BUCKET_MIB)
