"""Compile a run's graphs before it starts; list, push or pull the compile cache.

For example:

    $ regauge compile run.toml --jobs 4
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from regauge import accelerators, commands
from regauge.commands import AsJson, DryRun, Override
from regauge.system import processes
from regauge.system.errors import SettingsError
from regauge.system.files import check_folder
from regauge.training.compile import cache
from regauge.training.defaults import count_local_processes
from regauge.training.settings import TrainSettings

ROOT = TrainSettings
OUTPUT = "output.folder"


def main(
    run_file: Annotated[
        Path | None,
        Parameter(help="Run file (TOML or JSON); not needed with --list, --push or --pull."),
    ] = None,
    *overrides: Override,
    listing: Annotated[bool, Parameter(name="--list", help="List compile cache entries.")] = False,
    push: Annotated[
        str | None, Parameter(help="Copy the compile cache to this folder or address.")
    ] = None,
    pull: Annotated[
        str | None, Parameter(help="Copy the compile cache from this folder or address first.")
    ] = None,
    jobs: Annotated[
        int, Parameter(help="Number of parallel compilations, each with the whole model.")
    ] = 1,
    part: Annotated[
        str | None, Parameter(help="Compile only part of the shapes, such as 2/4.")
    ] = None,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> dict[str, Any]:
    """Compile all declared shapes of a run ahead of time, so that the run finds its graphs.

    For example:

        >>> regauge.compile("run.toml", jobs=4)
    """
    if run_file is None:
        if not (listing or push or pull):
            raise SettingsError("no run to compile", "name a run file, or add --list")
        return commands.show(_synchronize_cache(cache.default_root(), push, pull), as_json=json)
    settings = commands.load_settings(ROOT, run_file, overrides)
    if dry_run:
        return commands.show(plan(settings), as_json=json)
    if listing or push or pull:
        root = Path(_set_cache(settings).execution.compile_cache or "")
        return commands.show(_synchronize_cache(root, push, pull), as_json=json)
    return commands.show(run(settings, jobs, part), as_json=json)


def _set_cache(settings: TrainSettings) -> TrainSettings:
    """Return the settings with the default cache if they do not name one.

    Raises SettingsError if the cache is not a folder.
    """
    root = Path(settings.execution.compile_cache or cache.default_root())
    check_folder(root, "execution.compile_cache")
    execution = settings.execution.model_copy(update={"compile_cache": str(root)})
    return settings.model_copy(update={"execution": execution})


def plan(settings: TrainSettings) -> dict[str, Any]:
    """Return the shapes to compile; imports torch only to choose a device."""
    from regauge.training.dry_run import plan_run

    settings = _set_cache(settings)
    return {**plan_run(settings), "cache": settings.execution.compile_cache}


def run(settings: TrainSettings, jobs: int = 1, part: str | None = None) -> dict[str, Any]:
    """Compile with the run's process count; return the found and compiled graphs."""
    from regauge.training import dry_run
    from regauge.training.compile import parallel

    settings = _set_cache(settings)
    dry_run.check_run(settings)
    subset = parallel.ShapeSubset.parse(part) if part else parallel.ShapeSubset()
    if part is None and not processes.is_launched():
        accelerator = settings.accelerator or accelerators.choose()[0]
        if jobs > 1 or accelerator.graph_collector():
            parallel.compile_in_parallel(settings, accelerator, jobs)
    size = count_local_processes(settings.execution.processes, settings.accelerator)
    if size == 1 or processes.is_launched():
        from regauge.training.compile.ahead import compile_ahead

        return compile_ahead(settings, processes.detect_world(settings.execution.processes), subset)
    arguments = ("--part", part) if part else ()
    commands.run_in_processes("compile", settings, size, Path(settings.output.folder), arguments)
    return _synchronize_cache(Path(str(settings.execution.compile_cache)), None, None)


def _synchronize_cache(root: Path, push: str | None, pull: str | None) -> dict[str, Any]:
    answer: dict[str, Any] = {"cache": str(root)}
    if pull:
        answer["pulled"] = cache.copy_entries(pull, str(root))
    if push:
        answer["pushed"] = cache.copy_entries(str(root), push)
    return {**answer, "entries": cache.list_entries(root)}
