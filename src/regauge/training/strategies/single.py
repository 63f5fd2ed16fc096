"""One process that holds the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from regauge.training.strategies import Placement, ShardedModel, Strategy, Transfer, UpdateTraffic

if TYPE_CHECKING:
    from torch import nn

    from regauge.system.processes import World

ONE_BUCKET_MIB = 1 << 20
"""Larger than any model: buckets are useless without a reduction."""


class Single(Strategy):
    """One process holds the whole model."""

    peer_names: ClassVar[tuple[str, ...]] = ("none", "single_device")

    complexity: ClassVar[int] = 0

    def obstacle(self, world: World, optimizer: str, *, lazy: bool = False) -> str | None:
        del optimizer, lazy
        return None if world.size == 1 else f"it needs 1 process, this run has {world.size}"

    def communication(self, traffic: UpdateTraffic) -> tuple[Transfer, ...]:
        del traffic
        return ()

    def prepare(self, module: nn.Module, placement: Placement) -> ShardedModel:
        from regauge.training.strategies._replica import ReplicatedModel

        return ReplicatedModel(module, placement, bucket_mib=ONE_BUCKET_MIB)
