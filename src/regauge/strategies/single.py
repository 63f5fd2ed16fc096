"""One process, the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.strategies import Form, Load, Prepared, Site, Strategy

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

    def load(self, weights: Mapping[str, Form], processes: int, itemsize: int) -> Load:
        from regauge.strategies._replica import load

        del processes
        return load(weights, itemsize)

    def prepare(self, module: nn.Module, site: Site) -> Prepared:
        from regauge.strategies._replica import Replica

        return Replica(module, site, bucket_mib=ONE_BUCKET_MIB)
