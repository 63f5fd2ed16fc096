"""ZeRO stage 1 (Rajbhandari et al., 2020): masters and moments are spread, the model is not.

A process owns whole parameters, balanced by bytes, so that any optimizer runs unchanged on them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from regauge.strategies import MemoryEstimate, ParamSpec, ShardedModel, Site, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


class Zero1(Strategy):
    """Each process updates its own parameters and sends them to the others."""

    bucket_mib: int = Field(default=25, ge=1)
    """Gradients that are summed in one message."""

    def estimate_memory(
        self, weights: Mapping[str, ParamSpec], processes: int, itemsize: int
    ) -> MemoryEstimate:
        from regauge.strategies._replica import estimate_memory

        sizes = {name: math.prod(form.shape) for name, form in weights.items() if form.trained}
        owners = balanced(sizes, processes)
        totals = [0] * processes
        for name, owner in owners.items():
            totals[owner] += sizes[name]
        fullest = totals.index(max(totals))
        return estimate_memory(
            weights, itemsize, {name for name in owners if owners[name] == fullest}
        )

    def prepare(self, module: nn.Module, site: Site) -> ShardedModel:
        from regauge.strategies._replica import Replica

        trained = (each for each in module.named_parameters() if each[1].requires_grad)
        sizes = {name: value.numel() for name, value in trained}
        owners = balanced(sizes, site.world.size)
        return Replica(module, site, bucket_mib=self.bucket_mib, owner=owners.__getitem__)


def balanced(sizes: dict[str, int], processes: int) -> dict[str, int]:
    """Return the owner of each name: the largest first, each to the least loaded process."""
    loads = [0] * processes
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner = loads.index(min(loads))
        owners[name] = owner
        loads[owner] += sizes[name]
    return owners
