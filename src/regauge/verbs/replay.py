"""Compute some steps of a run again, and write down what each module computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regauge import processes, verbs
from regauge.training.defaults import local_processes
from regauge.training.divergence.settings import Replay
from regauge.verbs import AsJson, DryRun, Override, RunFile

ROOT = Replay
OUTPUT = "output.folder"


def main(
    run_file: RunFile,
    *overrides: Override,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> dict[str, Any]:
    """Compute steps of a run again in another folder, and write down what each module computed."""
    settings = verbs.load(ROOT, run_file, overrides)
    answer = plan(settings) if dry_run else run(settings)
    return answer if processes.launched() else verbs.show(answer, as_json=json)


def plan(settings: Replay) -> dict[str, Any]:
    """Return what would be computed, without torch where the device is named."""
    asked = settings.replay
    return {
        "output": settings.output.folder,
        "from": asked.state or "the first weights",
        "until_step": asked.until,
        "watched": list(asked.watch),
        "processes": settings.execution.processes,
    }


def run(settings: Replay) -> dict[str, Any]:
    """Compute on as many processes as the run has; return where the record is."""
    size = local_processes(settings.execution.processes, settings.accelerator)
    if size == 1 or processes.launched():
        from regauge.training.divergence.replay import replay

        return replay(settings, processes.world())
    folder = Path(settings.output.folder)
    verbs.spread("replay", settings, size, folder)
    return {"output": str(folder), "steps": settings.replay.until}
