"""Fully sharded data parallel: weights, gradients and moments are sharded over all processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import field_validator

from regauge.training.strategies import (
    MemoryEstimate,
    Placement,
    ShardedModel,
    Shards,
    Strategy,
    Transfer,
    UpdateTraffic,
    estimate_shards,
    find_sharding_obstacle,
    list_shard_transfers,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from regauge.models.weight_shapes import ParamSpec
    from regauge.system.processes import World

OTHER_STRATEGIES = {
    "no-shard": 'set strategy.kind = "ddp"',
    "hybrid": 'set strategy.kind = "hsdp", and strategy.shards',
    "hybrid-shard": 'set strategy.kind = "hsdp", and strategy.shards',
}
"""Other frameworks' sharding names -> settings that select them here."""


class Fsdp(Strategy):
    """FSDP2; each model block is one sharding unit."""

    peer_names: ClassVar[tuple[str, ...]] = (
        "fsdp2",
        "full_shard",
        "zero2",
        "zero3",
        "deepspeed_stage_2",
        "deepspeed_stage_3",
    )

    needs_recompute: ClassVar[bool] = True
    complexity: ClassVar[int] = 3

    sharding: Literal["full-shard", "shard-grad-op"] = "full-shard"
    """Free gathered weights after the forward pass (ZeRO-3), or keep them for the backward pass."""

    @field_validator("sharding", mode="before")
    @classmethod
    def _check_sharding(cls, value: object) -> object:
        if isinstance(value, str) and value in OTHER_STRATEGIES:
            raise ValueError(f"'{value}' is a separate strategy; {OTHER_STRATEGIES[value]}")
        return value

    @property
    def gather_unit(self) -> Literal["layers", "model"]:
        return "layers" if self.sharding == "full-shard" else "model"

    def count_shards(self, processes: int) -> Shards:
        return Shards(processes, processes, processes)

    def communication(self, traffic: UpdateTraffic) -> tuple[Transfer, ...]:
        return list_shard_transfers(traffic)

    def obstacle(self, world: World, optimizer: str, *, lazy: bool = False) -> str | None:
        del world
        return find_sharding_obstacle(optimizer, lazy=lazy)

    def estimate_memory(
        self, weights: Mapping[str, ParamSpec], processes: int, itemsize: int
    ) -> MemoryEstimate:
        return estimate_shards(weights, processes, itemsize)

    def prepare(self, module: nn.Module, placement: Placement) -> ShardedModel:
        from regauge.training.strategies._sharded import SHARD_DIM, FsdpModel, build_mesh

        mesh = build_mesh(placement, (placement.world.size,), (SHARD_DIM,))
        is_freed = self.sharding == "full-shard"
        return FsdpModel(module, placement, mesh, reshard_after_forward=is_freed)
