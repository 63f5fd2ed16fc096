"""The checks of a run's own processes, before it allocates anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.health.collectives import Place, check_collectives
from regauge.health.device import check_device
from regauge.health.findings import Finding, require
from regauge.health.hosts import check_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from regauge.accelerators import Accelerator, Precision
    from regauge.hooks import Inject
    from regauge.processes import World


def preflight(
    accelerator: Accelerator,
    device: torch.device,
    precision: Precision,
    world: World,
    inject: Inject,
) -> None:
    """Raise PreflightError where the device, or what the processes tell each other, is wrong.

    A lazy device is left to `regauge doctor`: each of these checks would be compiled first.
    """
    place = Place.of(world, device)
    if not accelerator.lazy:
        _require(check_device(accelerator, device, (precision,), place.where, inject))
    if world.size > 1:
        _require(check_collectives(place, inject))
        require(check_hosts(world.size))


def _require(checks: Iterable[Finding | str]) -> None:
    """Raise PreflightError at the first check that is bad: the next ones are not begun."""
    for found in checks:
        if isinstance(found, Finding):
            require([found])
