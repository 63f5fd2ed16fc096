"""Checks by a run's processes before they allocate anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.supervision.health.collectives import CheckGroup, check_collectives, check_hosts
from regauge.supervision.health.device import check_device
from regauge.supervision.health.findings import Finding, raise_if_bad
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from regauge.accelerators import Accelerator, Precision
    from regauge.system.hooks import Inject
    from regauge.system.processes import World


def run_preflight(
    accelerator: Accelerator,
    device: torch.device,
    precision: Precision,
    world: World,
    inject: Inject,
) -> None:
    """Check the device, the collectives and the hosts; raises PreflightError for a bad one.

    A single process on a busy machine is not refused for low speed: no other process waits for it.
    Lazy devices are checked by `regauge doctor` only, because each check would have to be compiled.
    """
    group = CheckGroup.from_world(world, device)
    if not accelerator.is_lazy:
        checks = check_device(accelerator, device, (precision,), group.location, inject)
        _raise_at_first_bad(checks, is_single=world.size == 1)
    if world.size > 1:
        _raise_at_first_bad(check_collectives(group, inject), is_single=False)
        raise_if_bad(check_hosts(world.size))


def _raise_at_first_bad(checks: Iterable[Finding | str], *, is_single: bool) -> None:
    """Raise PreflightError at the first bad finding; later checks do not begin."""
    for check in checks:
        if isinstance(check, Finding) and not check.ok and check.may_be_load and is_single:
            logger.warning(f"{check.check}: {check.problem}; other programs may use the machine")
        elif isinstance(check, Finding):
            raise_if_bad([check])
