"""Finds the devices behind a failed preflight."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from regauge.config.output_files import FAULTS
from regauge.supervision.health.examination import examine
from regauge.supervision.health.findings import raise_if_bad
from regauge.system.errors import PreflightError

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.accelerators import Accelerator
    from regauge.supervision.failures import Failure


def examine_devices(
    failure: Failure,
    accelerator: Accelerator,
    devices: tuple[int, ...],
    folder: Path,
    fault_plan: str | None,
) -> tuple[Failure, set[int]]:
    """Examine devices after a failed preflight; return the failure with its cause, and bad ranks.

    `folder` is the run's output folder.
    """
    examination = examine(
        accelerator,
        len(devices),
        fault_plan=fault_plan,
        record=folder / FAULTS,
        devices=devices,
    )
    bad = [finding for finding in examination.findings if not finding.ok]
    try:
        raise_if_bad(bad)
    except PreflightError as error:
        evidence = {**failure.evidence, "findings": [finding.to_row() for finding in bad]}
        failure = replace(failure, problem=str(error), evidence=evidence)
    return failure, examination.bad_ranks
