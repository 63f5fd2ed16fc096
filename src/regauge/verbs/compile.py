"""Compile the graphs of a run before it starts; list, push and pull what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from regauge import accelerators, processes, verbs
from regauge.training.defaults import local_processes
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
    jobs: Annotated[int, Parameter(help="processes at once, each with the whole model")] = 1,
    part: Annotated[str | None, Parameter(help="only a share of the shapes, such as 2/4")] = None,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> dict[str, Any]:
    """Do a trial of a run's declared shapes, so that the run finds its graphs compiled."""
    settings = verbs.load(ROOT, run_file, overrides)
    if dry_run:
        return verbs.show(plan(settings), as_json=json)
    if listing or push or pull:
        return verbs.show(_keep(settings, push, pull), as_json=json)
    return verbs.show(run(settings, jobs, part), as_json=json)


def plan(settings: Training) -> dict[str, Any]:
    """Return what would be compiled, without torch where the device is named."""
    from regauge.training.dry_run import plan as planned

    return {**planned(settings), "cache": settings.execution.compile_cache}


def run(settings: Training, jobs: int = 1, part: str | None = None) -> dict[str, Any]:
    """Compile on as many processes as the run has; return what was found and what was made."""
    from regauge.training import dry_run as planning
    from regauge.training.compile import parallel

    planning.check_cache(settings)
    planning.check(settings)
    share = parallel.Part.parsed(part) if part else parallel.Part()
    if part is None and not processes.launched():
        accelerator = settings.accelerator or accelerators.choose()[0]
        if jobs > 1 or accelerator.collecting():
            parallel.compile_apart(settings, accelerator, jobs)
    size = local_processes(settings.execution.processes, settings.accelerator)
    if size == 1 or processes.launched():
        from regauge.training.compile.ahead import compile_ahead

        return compile_ahead(settings, processes.world(), share)
    arguments = ("--part", part) if part else ()
    verbs.spread("compile", settings, size, Path(settings.output.folder), arguments)
    return _keep(settings, None, None)


def _keep(settings: Training, push: str | None, pull: str | None) -> dict[str, Any]:
    from regauge.training.compile import cache
    from regauge.training.dry_run import check_cache

    check_cache(settings)
    root = str(settings.execution.compile_cache)
    answer: dict[str, Any] = {}
    if pull:
        answer["pulled"] = cache.copy(pull, root)
    if push:
        answer["pushed"] = cache.copy(root, push)
    return {**answer, "entries": cache.listed(Path(root))}
