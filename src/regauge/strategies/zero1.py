"""ZeRO stage 1 (Rajbhandari et al., 2020): masters and moments are spread, the model is not.

A process owns whole parameters, balanced by bytes, so that any optimizer runs unchanged on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from regauge.strategies import Prepared, Site, Strategy

if TYPE_CHECKING:
    from torch import nn


class Zero1(Strategy):
    """Each process updates its own parameters and sends them to the others."""

    bucket_mib: int = Field(default=25, ge=1)
    """Gradients that are summed in one message."""

    def prepare(self, module: nn.Module, site: Site) -> Prepared:
        from regauge.strategies._replica import Replica

        sizes = {name: value.numel() for name, value in module.named_parameters()}
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
