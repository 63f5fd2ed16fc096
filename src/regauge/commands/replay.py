"""Recompute steps of a run, and record every module's values.

For example:

    $ regauge replay out/run replay.until=100
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from regauge import commands, config
from regauge.commands import AsJson, DryRun, Override
from regauge.system import choices, processes
from regauge.training.defaults import count_local_processes
from regauge.training.divergence.settings import ReplaySettings

ROOT = ReplaySettings
OUTPUT = "output.folder"


def main(
    run_file: Annotated[
        Path, Parameter(help="Run file (TOML), run.json, or a run's output folder.")
    ],
    *overrides: Override,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> dict[str, Any]:
    """Recompute steps of a run in another folder, and record every module's values.

    For example:

        >>> regauge.replay("out/run", replay__until=100)
    """
    settings = _load_settings(run_file, overrides)
    if dry_run:
        return commands.show(plan(settings), as_json=json)
    answer = run(settings)
    return answer if processes.is_launched() else commands.show(answer, as_json=json)


def _load_settings(run_file: Path, overrides: tuple[str, ...]) -> ReplaySettings:
    """Build the settings from a run file, or from the run in a folder.

    By default a folder's record is written next to it.
    """
    if not run_file.is_dir():
        return commands.load_settings(ROOT, run_file, overrides)
    tables = config.read_saved_run(run_file)
    folder = run_file.resolve()
    tables["output"] = {"folder": str(folder.with_name(f"{folder.name}-replay"))}
    tables = config.apply_overrides({"replay": {}, **tables}, overrides)
    choices.allow_imports(config.apply_overrides({}, overrides))
    return config.build(ROOT, tables, commands.table_names(), str(run_file))


def plan(settings: ReplaySettings) -> dict[str, Any]:
    """Return the steps to compute, without importing torch."""
    options = settings.replay
    return {
        "output": settings.output.folder,
        "initial_state": options.checkpoint or "initial weights",
        "last_step": options.until,
        "capture_steps": list(options.capture_steps),
        "processes": settings.execution.processes,
    }


def run(settings: ReplaySettings) -> dict[str, Any]:
    """Compute the steps with the run's processes; return the record folder."""
    size = count_local_processes(settings.execution.processes, settings.accelerator)
    if size == 1 or processes.is_launched():
        from regauge.training.divergence.replay import replay

        return replay(settings, processes.detect_world(settings.execution.processes))
    folder = Path(settings.output.folder)
    commands.run_in_processes("replay", settings, size, folder)
    return {"output": str(folder), "steps": settings.replay.until}
