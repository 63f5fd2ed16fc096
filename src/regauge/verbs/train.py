"""Train a model, or go on with a run that was stopped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from regauge import config, processes, verbs
from regauge.training.settings import Training
from regauge.verbs import AsJson, DryRun, Override, RunFile

ROOT = Training
OUTPUT = "output.folder"


def main(
    run_file: RunFile, *overrides: Override, dry_run: DryRun = False, json: AsJson = False
) -> dict[str, Any]:
    """Train as a run file says; the same command goes on with a run that was stopped."""
    settings = verbs.load(Training, run_file, overrides)
    return verbs.show(plan(settings) if dry_run else run(settings), as_json=json)


def plan(settings: Training) -> dict[str, Any]:
    """Return what a run would do, without torch and without allocating anything."""
    from regauge.training.plan import plan as planned

    return planned(settings)


def run(settings: Training) -> dict[str, Any]:
    """Train on as many processes as the settings or the launcher say; return the result."""
    from regauge.training import plan as planning
    from regauge.training.records import RESULT

    planning.check(settings)
    size = verbs.local_processes(settings.execution.processes, settings.accelerator)
    if size == 1 or processes.launched():
        began = time.perf_counter()
        from regauge.training.run import attempt

        return attempt(settings, processes.world(), began)
    folder = Path(settings.output.folder)
    verbs.spread("train", settings, size, folder)
    return config.read(folder / RESULT)
