"""Fully sharded data parallel: weights, gradients and moments are spread over all processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from regauge.strategies import Prepared, Site, Strategy

if TYPE_CHECKING:
    from torch import nn

    from regauge.processes import World


class Fsdp(Strategy):
    """FSDP2, wrapped by the model's own blocks."""

    sharding: Literal["full-shard", "shard-grad-op"] = "full-shard"
    """Whether weights are freed after the forward pass (ZeRO-3), or kept until the backward."""

    def obstacle(self, world: World, optimizer: str, *, lazy: bool = False) -> str | None:
        from regauge.strategies._sharded import obstacle

        del world
        return obstacle(optimizer, lazy=lazy)

    def prepare(self, module: nn.Module, site: Site) -> Prepared:
        from regauge.strategies._sharded import Sharded, mesh

        shards = mesh(site, (site.world.size,), ("shard",))
        free = self.sharding == "full-shard"
        return Sharded(module, site, shards, reshard_after_forward=free)
