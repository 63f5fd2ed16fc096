"""Compute steps of a run again, and record the values of every module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regauge import processes, verbs
from regauge.training.defaults import count_local_processes
from regauge.training.divergence.settings import ReplaySettings
from regauge.verbs import AsJson, DryRun, Override, RunFile

ROOT = ReplaySettings
OUTPUT = "output.folder"


def main(
    run_file: RunFile,
    *overrides: Override,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> dict[str, Any]:
    """Compute steps of a run again in another folder, and record the values of every module."""
    settings = verbs.load_settings(ROOT, run_file, overrides)
    if dry_run:
        return verbs.show(plan(settings), as_json=json)
    answer = run(settings)
    return answer if processes.is_launched() else verbs.show(answer, as_json=json)


def plan(settings: ReplaySettings) -> dict[str, Any]:
    """Return the steps that would be computed, without importing torch."""
    options = settings.replay
    return {
        "output": settings.output.folder,
        "initial_state": options.checkpoint or "initial weights",
        "last_step": options.until,
        "capture_steps": list(options.capture_steps),
        "processes": settings.execution.processes,
    }


def run(settings: ReplaySettings) -> dict[str, Any]:
    """Compute the steps with the processes of the run; return the folder of the record."""
    size = count_local_processes(settings.execution.processes, settings.accelerator)
    if size == 1 or processes.is_launched():
        from regauge.training.divergence.replay import replay

        return replay(settings, processes.detect_world(settings.execution.processes))
    folder = Path(settings.output.folder)
    verbs.run_in_processes("replay", settings, size, folder)
    return {"output": str(folder), "steps": settings.replay.until}
