"""Evaluate trained models on held-out rows, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regauge import config, processes, verbs
from regauge.evaluation.settings import EVALUATION, EvaluateSettings
from regauge.files import check_folder
from regauge.training.defaults import count_local_processes
from regauge.verbs import AsJson, DryRun, Override, RunFile

ROOT = EvaluateSettings
OUTPUT = "output.folder"


def main(
    run_file: RunFile, *overrides: Override, dry_run: DryRun = False, json: AsJson = False
) -> dict[str, Any]:
    """Evaluate the models of a run file on the held-out rows of its dataset."""
    settings = verbs.load_settings(EvaluateSettings, run_file, overrides)
    if dry_run:
        return verbs.show(plan(settings), as_json=json)
    return verbs.show(run(settings), as_json=json)


def plan(settings: EvaluateSettings) -> dict[str, Any]:
    """Return the planned evaluation, without importing torch."""
    from regauge.data.dataset import read_manifest

    check_folder(Path(settings.output.folder), "output.folder")
    manifest = read_manifest(Path(settings.data.path))
    if settings.evaluate.task_settings == "given":
        settings.task.check_dataset(manifest)
    num_rows = manifest.splits["heldout"].rows
    return {
        "output": settings.output.folder,
        "models": dict(settings.models),
        "heldout_rows": min(num_rows, settings.evaluation.rows or num_rows),
        "processes": settings.execution.processes,
    }


def run(settings: EvaluateSettings) -> dict[str, Any]:
    """Evaluate with the number of processes of the settings or the launcher; return the table."""
    plan(settings)
    size = count_local_processes(settings.execution.processes, settings.accelerator)
    if size == 1 or processes.is_launched():
        from regauge.evaluation.offline import evaluate_models

        return evaluate_models(settings, processes.detect_world(settings.execution.processes))
    folder = Path(settings.output.folder)
    verbs.run_in_processes("evaluate", settings, size, folder)
    return config.read(folder / EVALUATION)
