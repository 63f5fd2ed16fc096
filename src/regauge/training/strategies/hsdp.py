"""Hybrid sharding: weights are sharded within a group of processes and replicated over groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

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


class Hsdp(Strategy):
    """FSDP2 on a two-dimensional mesh: replicas x shards."""

    peer_names: ClassVar[tuple[str, ...]] = ("hybrid_shard",)

    needs_recompute: ClassVar[bool] = True
    complexity: ClassVar[int] = 4

    shards: int = Field(default=2, ge=2)
    """Processes that share one model copy, usually all processes on one machine."""

    @property
    def gather_unit(self) -> Literal["layers"]:
        return "layers"

    def adapt(self, processes_per_machine: int) -> Hsdp:
        """Return the strategy with one group per machine."""
        return self.model_copy(update={"shards": max(processes_per_machine, 2)})

    def count_shards(self, processes: int) -> Shards:
        shards = min(processes, self.shards)
        return Shards(shards, shards, shards)

    def communication(self, traffic: UpdateTraffic) -> tuple[Transfer, ...]:
        """Return FSDP's collectives inside a machine, and sums of shards between machines."""
        between = Transfer("all_reduce", traffic.gradients, group="between")
        return (*list_shard_transfers(traffic, "inside"), between)

    def obstacle(self, world: World, optimizer: str, *, lazy: bool = False) -> str | None:
        if reason := find_sharding_obstacle(optimizer, lazy=lazy):
            return reason
        if world.size % self.shards or world.size < 2 * self.shards:
            return f"{world.size} processes do not form two or more groups of {self.shards}"
        return None

    def estimate_memory(
        self, weights: Mapping[str, ParamSpec], processes: int, itemsize: int
    ) -> MemoryEstimate:
        del processes
        return estimate_shards(weights, self.shards, itemsize)

    def prepare(self, module: nn.Module, placement: Placement) -> ShardedModel:
        from regauge.training.strategies._sharded import SHARD_DIM, FsdpModel, build_mesh

        shape = (placement.world.size // self.shards, self.shards)
        mesh = build_mesh(placement, shape, ("replicate", SHARD_DIM))
        return FsdpModel(module, placement, mesh, reshard_after_forward=True)
