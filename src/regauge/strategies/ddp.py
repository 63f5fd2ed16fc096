"""Data parallel: the whole model, optimizer and gradients on every process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from regauge.strategies import MemoryEstimate, ParamSpec, ShardedModel, Site, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


class Ddp(Strategy):
    """Every process holds everything; gradients are summed in buckets."""

    bucket_mib: int = Field(default=25, ge=1)
    """Gradients that are summed in one message."""

    def estimate_memory(
        self, weights: Mapping[str, ParamSpec], processes: int, itemsize: int
    ) -> MemoryEstimate:
        from regauge.strategies._replica import estimate_memory

        del processes
        return estimate_memory(weights, itemsize)

    def prepare(self, module: nn.Module, site: Site) -> ShardedModel:
        from regauge.strategies._replica import Replica

        return Replica(module, site, bucket_mib=self.bucket_mib)
