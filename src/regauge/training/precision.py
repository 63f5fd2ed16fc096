"""What a run computes in: by the device's instructions, and by how fast they are found to be.

A processor may have instructions that its libraries do not use, or that a hypervisor emulates.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from regauge.config import dump
from regauge.errors import SettingsError
from regauge.log import logger
from regauge.training.agreement import PROBE, Agreement, word

if TYPE_CHECKING:
    from regauge.accelerators import Accelerator, Precision
    from regauge.processes import World
    from regauge.supervision.orders import Report
    from regauge.training.settings import Training

DECIDED, NAME = "precision.json", "precision"
FASTER = 1.5
"""Times the speed of the first that is offered; one that has less is not worth its memory."""


def offered(accelerator: Accelerator, wanted: str) -> Precision:
    """Return the precision to compute in; raises SettingsError for one the device lacks."""
    usable = accelerator.precisions()
    found = next((each for each in usable if wanted in ("auto", each)), None)
    if found is None:
        problem = f"accelerator '{accelerator.kind}' does not train in {wanted} here"
        raise SettingsError(problem, f"set execution.precision to one of: {', '.join(usable)}")
    return found


def settled(
    settings: Training, accelerator: Accelerator, world: World, report: Report
) -> Precision:
    """Return what a run computes in; every process of it calls this, and all get the same.

    Raises SettingsError for a precision that the device lacks.
    """
    execution = settings.execution
    if execution.precision != "auto":
        return offered(accelerator, execution.precision)
    if world.size == 1:
        return _fastest(accelerator)
    file = Path(settings.output.folder) / PROBE / DECIDED
    agreement = Agreement(file, word(dump(accelerator), world.size, world.local_size))
    seconds = execution.timeout_seconds
    found = agreement.reached(lambda: {NAME: _fastest(accelerator)}, world, report, seconds)
    return offered(accelerator, found[NAME])


def _fastest(accelerator: Accelerator) -> Precision:
    """Return the first that is offered, or what was measured to be much faster, and say why."""
    precision = offered(accelerator, "auto")
    rates = accelerator.rates()
    if not rates:
        logger.info("precision %s: the first that '%s' offers", precision, accelerator.kind)
        return precision
    best = max(rates, key=lambda each: rates[each])
    if rates[best] > FASTER * rates[precision]:
        precision = best
    told = (f"{each} {rate / 1e9:.3g}" for each, rate in rates.items())
    logger.info("precision %s: GFLOP/s measured here: %s", precision, ", ".join(told))
    return precision
