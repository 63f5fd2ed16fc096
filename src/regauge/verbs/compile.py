"""Compile the graphs of a run before it starts; list, push and pull what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from regauge import processes, verbs
from regauge.training.settings import Training
from regauge.verbs import AsJson, DryRun, Override, RunFile

ROOT = Training
OUTPUT = "output.folder"


def main(
    run_file: RunFile,
    *overrides: Override,
    listing: Annotated[bool, Parameter(name="--list", help="show what is kept")] = False,
    push: Annotated[str | None, Parameter(help="copy all of it to a folder or an address")] = None,
    pull: Annotated[str | None, Parameter(help="copy all of it from there first")] = None,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> dict[str, Any]:
    """Do a trial of a run's declared shapes, so that the run finds its graphs compiled."""
    settings = verbs.load(ROOT, run_file, overrides)
    if dry_run:
        return verbs.show(plan(settings), as_json=json)
    if listing or push or pull:
        return verbs.show(_keep(settings, push, pull), as_json=json)
    return verbs.show(run(settings), as_json=json)


def plan(settings: Training) -> dict[str, Any]:
    """Return what would be compiled, without torch where the device is named."""
    from regauge.training.plan import plan as planned

    return {**planned(settings), "cache": settings.execution.compile_cache}


def run(settings: Training) -> dict[str, Any]:
    """Compile on as many processes as the run has; return what was found and what was made."""
    from regauge.training.plan import check_cache

    check_cache(settings)
    size = verbs.local_processes(settings.execution.processes, settings.accelerator)
    if size == 1 or processes.launched():
        from regauge.training.ahead import compile_ahead

        return compile_ahead(settings, processes.world())
    verbs.spread("compile", settings, size, Path(settings.output.folder))
    return _keep(settings, None, None)


def _keep(settings: Training, push: str | None, pull: str | None) -> dict[str, Any]:
    from regauge.training import cache
    from regauge.training.plan import check_cache

    check_cache(settings)
    root = str(settings.execution.compile_cache)
    answer: dict[str, Any] = {}
    if pull:
        answer["pulled"] = cache.copy(pull, root)
    if push:
        answer["pushed"] = cache.copy(root, push)
    return {**answer, "entries": cache.listed(Path(root))}
