"""Fully sharded data parallel: weights, gradients and moments are spread over all processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import field_validator

from regauge.strategies import MemoryEstimate, ParamSpec, ShardedModel, Site, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from regauge.processes import World


ELSEWHERE = {
    "no-shard": 'set strategy.kind = "ddp"',
    "hybrid": 'set strategy.kind = "hsdp", and strategy.shards',
    "hybrid-shard": 'set strategy.kind = "hsdp", and strategy.shards',
}
"""What others call a sharding, and how it is asked for here."""


class Fsdp(Strategy):
    """FSDP2, wrapped by the model's own blocks."""

    recomputes: ClassVar[bool] = True

    sharding: Literal["full-shard", "shard-grad-op"] = "full-shard"
    """Whether weights are freed after the forward pass (ZeRO-3), or kept until the backward."""

    @field_validator("sharding", mode="before")
    @classmethod
    def _known_by_another_name(cls, value: object) -> object:
        if isinstance(value, str) and value in ELSEWHERE:
            raise ValueError(f"'{value}' is another strategy here: {ELSEWHERE[value]}")
        return value

    def obstacle(self, world: World, optimizer: str, *, lazy: bool = False) -> str | None:
        from regauge.strategies._sharded import obstacle

        del world
        return obstacle(optimizer, lazy=lazy)

    def estimate_memory(
        self, weights: Mapping[str, ParamSpec], processes: int, itemsize: int
    ) -> MemoryEstimate:
        from regauge.strategies._sharded import estimate_memory

        return estimate_memory(weights, processes, itemsize)

    def prepare(self, module: nn.Module, site: Site) -> ShardedModel:
        from regauge.strategies._sharded import SHARD, Sharded, mesh

        shards = mesh(site, (site.world.size,), (SHARD,))
        free = self.sharding == "full-shard"
        return Sharded(module, site, shards, reshard_after_forward=free)
