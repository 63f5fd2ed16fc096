"""Distributed data parallel: every process holds weights, gradients and moments."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from regauge.training.strategies import Placement, ShardedModel, Strategy

if TYPE_CHECKING:
    from torch import nn


class Ddp(Strategy):
    """Every process holds the whole model; gradients are summed over processes in buckets."""

    peer_names: ClassVar[tuple[str, ...]] = ("data_parallel", "distributed_data_parallel")

    complexity: ClassVar[int] = 1
    sums_once: ClassVar[bool] = True

    bucket_mib: int = Field(default=25, ge=1)
    """Gradient bucket size per all-reduce."""

    def prepare(self, module: nn.Module, placement: Placement) -> ShardedModel:
        from regauge.training.strategies._replica import ReplicatedModel

        return ReplicatedModel(module, placement, bucket_mib=self.bucket_mib)
