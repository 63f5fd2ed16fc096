"""Say whether a run may start here: devices, their collectives, storage, and what is missing."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from regauge import accelerators, choices, verbs
from regauge.health.findings import require
from regauge.training.defaults import local_processes
from regauge.training.settings import Training

if TYPE_CHECKING:
    from regauge.accelerators import Accelerator
    from regauge.health.findings import Bandwidth, Finding

HERE = "."


def main(
    run_file: Annotated[
        Path | None, Parameter(help="a run file, whose device, processes and folder are checked")
    ] = None,
    *overrides: verbs.Override,
    survey: Annotated[bool, Parameter(help="only list what there is, and compute nothing")] = False,
    quick: Annotated[bool, Parameter(help="without large messages and the vendor's tools")] = False,
    processes: Annotated[int | None, Parameter(help="check with so many processes")] = None,
    chaos: Annotated[Path | None, Parameter(show=False, help="a plan of faults to inject")] = None,
    json: verbs.AsJson = False,
) -> dict[str, Any]:
    """Measure what a run needs of this machine; exit code 76 where it may not start.

    Devices are used by processes that are killed when they hang.
    """
    found = _survey()
    if survey:
        return verbs.show(found, as_json=json)
    settings = verbs.load(Training, run_file, overrides) if run_file else None
    accelerator = (settings.accelerator if settings else None) or accelerators.choose()[0]
    accelerators.require(accelerator)
    wanted = processes or (settings.execution.processes if settings else "auto")
    size = local_processes(wanted, accelerator)
    folder = Path(settings.output.folder if settings else HERE)
    root = settings.output.checkpoint.root if settings else None
    findings, bandwidths = _checked(accelerator, size, (folder, root), quick=quick, chaos=chaos)
    checked = {"checks": [finding.row() for finding in findings]}
    if bandwidths:
        checked["bandwidth"] = [asdict(row) for row in bandwidths]
    answer = verbs.show({**found, **checked}, as_json=json)
    require(findings)
    return answer


def _survey() -> dict[str, Any]:
    """Look at every accelerator without using one, and at what torch.compile needs."""
    found = accelerators.survey()
    rows = [
        {
            "name": kind,
            "usable": "yes" if availability.fitness else "no",
            "why": availability.reason,
            "precisions": _precisions(kind) if availability.fitness else "",
        }
        for kind, availability in found.items()
    ]
    chosen = max(found, key=lambda kind: found[kind].fitness)
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "accelerators": rows,
        "chosen": chosen,
        "compiling": choices.load("accelerators", chosen)().obstacle_to_compiling() or "possible",
    }


def _checked(
    accelerator: Accelerator,
    size: int,
    storage: tuple[Path, str | None],
    *,
    quick: bool,
    chaos: Path | None,
) -> tuple[list[Finding], list[Bandwidth]]:
    from regauge.health.examination import examine
    from regauge.health.machine import check_machine
    from regauge.health.vendors import check_vendors
    from regauge.testing.faults import read_plan

    if chaos is not None:
        read_plan(chaos)
    findings = list(check_machine(*storage))
    plan = str(chaos.resolve()) if chaos else None
    examined = examine(accelerator, size, quick=quick, fault_plan=plan)
    findings += examined.findings
    if not quick:
        findings += check_vendors(accelerator, size)
    return findings, examined.bandwidths


def _precisions(kind: str) -> str:
    return ", ".join(choices.load("accelerators", kind)().precisions())
