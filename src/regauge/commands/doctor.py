"""Check whether a run can start here: devices, collectives, storage and packages.

For example:

    $ regauge doctor run.toml --processes 8
"""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from regauge import accelerators, commands
from regauge.supervision.faults.faults import read_plan
from regauge.supervision.health.examination import examine
from regauge.supervision.health.findings import raise_if_bad
from regauge.supervision.health.machine import check_machine
from regauge.supervision.health.vendors import check_vendors, judge_counters, record_counters
from regauge.system import choices
from regauge.training.defaults import count_local_processes
from regauge.training.settings import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.accelerators import Accelerator, Availability
    from regauge.supervision.health.findings import Bandwidth, Finding

DEFAULT_FOLDER = "."


def main(
    run_file: Annotated[
        Path | None, Parameter(help="Run file whose device, processes and folder are checked.")
    ] = None,
    *overrides: commands.Override,
    survey: Annotated[
        bool, Parameter(help="Only list devices and packages, without checks.")
    ] = False,
    quick: Annotated[bool, Parameter(help="Skip large messages and vendor diagnostics.")] = False,
    processes: Annotated[int | None, Parameter(help="Number of processes.")] = None,
    chaos: Annotated[Path | None, Parameter(show=False, help="Fault plan to inject.")] = None,
    json: commands.AsJson = False,
) -> dict[str, Any]:
    """Measure the resources that a run needs; the exit code is 76 if the run cannot start.

    Child processes use the devices; they are killed if they hang.

    For example:

        >>> regauge.doctor("run.toml", processes=8)
    """
    machine = _survey()
    if survey:
        return commands.show(machine, as_json=json)
    settings = commands.load_settings(TrainSettings, run_file, overrides) if run_file else None
    accelerator = (settings.accelerator if settings else None) or accelerators.choose()[0]
    accelerators.check_available(accelerator)
    num_processes = processes or (settings.execution.processes if settings else "auto")
    size = count_local_processes(num_processes, accelerator)
    folder = Path(settings.output.folder if settings else DEFAULT_FOLDER)
    remote = settings.output.checkpoint.remote if settings else None
    findings, bandwidths = _run_checks(
        accelerator, size, (folder, remote), quick=quick, chaos=chaos
    )
    checks = [finding.to_document() if json else finding.to_row() for finding in findings]
    results: dict[str, Any] = {"checks": checks}
    if bandwidths:
        results["bandwidth"] = [asdict(bandwidth) for bandwidth in bandwidths]
    answer = commands.show({**machine, **results}, as_json=json)
    raise_if_bad(findings)
    return answer


def _survey() -> dict[str, Any]:
    """List the accelerators, and check the requirements of torch.compile.

    Only CPU precisions are measured, unless an earlier command measured them.
    """
    availabilities = accelerators.survey()
    rows = [
        {
            "name": kind,
            "available": availability.fitness > 0,
            "reason": availability.reason,
            "precisions": list(choices.load("accelerators", kind)().precisions())
            if availability.fitness
            else [],
        }
        for kind, availability in availabilities.items()
    ]
    selected = max(availabilities, key=lambda kind: availabilities[kind].fitness)
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "accelerators": rows,
        "matrix_products": _list_speeds(availabilities),
        "selected": selected,
        "torch_compile": choices.load("accelerators", selected)().compile_obstacle() or "available",
    }


def _run_checks(
    accelerator: Accelerator,
    size: int,
    storage: tuple[Path, str | None],
    *,
    quick: bool,
    chaos: Path | None,
) -> tuple[list[Finding], list[Bandwidth]]:
    """Run all checks; return their findings and the measured bandwidths.

    `storage` is the output folder and the remote checkpoint address, if any.
    """
    if chaos is not None:
        read_plan(chaos)
    findings = list(check_machine(*storage))
    plan = str(chaos.resolve()) if chaos else None
    with record_counters(accelerator) as readings:
        examination = examine(accelerator, size, quick=quick, fault_plan=plan)
    findings += [*examination.findings, *judge_counters(readings)]
    if not quick:
        findings += check_vendors(accelerator, size)
    return findings, examination.bandwidths


def _list_speeds(availabilities: Mapping[str, Availability]) -> list[dict[str, Any]]:
    return [
        {"accelerator": kind, "precision": precision, "times_fp32": round(speed, 2)}
        for kind, availability in availabilities.items()
        if availability.fitness
        for precision, speed in choices.load("accelerators", kind)().precision_speeds().items()
    ]
