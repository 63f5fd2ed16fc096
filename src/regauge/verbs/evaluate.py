"""Measure trained models on held-out rows, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regauge import config, processes, verbs
from regauge.evaluation.settings import EVALUATION, Evaluating
from regauge.training.defaults import local_processes
from regauge.verbs import AsJson, DryRun, Override, RunFile

ROOT = Evaluating
OUTPUT = "output.folder"


def main(
    run_file: RunFile, *overrides: Override, dry_run: DryRun = False, json: AsJson = False
) -> dict[str, Any]:
    """Measure the models that a run file names on the held-out rows of its dataset."""
    settings = verbs.load(Evaluating, run_file, overrides)
    return verbs.show(plan(settings) if dry_run else run(settings), as_json=json)


def plan(settings: Evaluating) -> dict[str, Any]:
    """Return what would be measured, without torch."""
    from regauge.data.dataset import read_manifest

    manifest = read_manifest(Path(settings.data.path))
    if settings.subjects.tasks == "given":
        settings.task.check(manifest)
    heldout = manifest.splits["heldout"].rows
    return {
        "output": settings.output.folder,
        "models": dict(settings.subjects.models),
        "heldout_rows": min(heldout, settings.evaluation.rows or heldout),
        "processes": settings.execution.processes,
    }


def run(settings: Evaluating) -> dict[str, Any]:
    """Measure on as many processes as the settings or the launcher say; return the table."""
    plan(settings)
    size = local_processes(settings.execution.processes, settings.accelerator)
    if size == 1 or processes.launched():
        from regauge.evaluation.offline import measure

        return measure(settings, processes.world())
    folder = Path(settings.output.folder)
    verbs.spread("evaluate", settings, size, folder)
    return config.read(folder / EVALUATION)
