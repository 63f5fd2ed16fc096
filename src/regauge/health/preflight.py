"""The checks of a run's processes before they allocate anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.health.collectives import CheckGroup, check_collectives
from regauge.health.device import check_device
from regauge.health.findings import Finding, raise_if_bad
from regauge.health.hosts import check_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from regauge.accelerators import Accelerator, Precision
    from regauge.hooks import Inject
    from regauge.processes import World


def run_preflight(
    accelerator: Accelerator,
    device: torch.device,
    precision: Precision,
    world: World,
    inject: Inject,
) -> None:
    """Check the device, the collectives and the hosts; raises PreflightError for a bad one.

    Lazy devices are checked by `regauge doctor` only, because each check would be compiled first.
    """
    group = CheckGroup.from_world(world, device)
    if not accelerator.is_lazy:
        _raise_at_first_bad(check_device(accelerator, device, (precision,), group.location, inject))
    if world.size > 1:
        _raise_at_first_bad(check_collectives(group, inject))
        raise_if_bad(check_hosts(world.size))


def _raise_at_first_bad(checks: Iterable[Finding | str]) -> None:
    """Raise PreflightError at the first bad finding; the checks after it do not begin."""
    for check in checks:
        if isinstance(check, Finding):
            raise_if_bad([check])
