"""Train a model, or go on with a run that was stopped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from regauge import processes, verbs
from regauge.errors import ChildError
from regauge.training.settings import Training

ROOT = Training
OUTPUT = "output.folder"


def main(
    run_file: Path, *overrides: str, dry_run: bool = False, json: bool = False
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
    from regauge.training.plan import check, local_processes, result_of

    check(settings)
    size = local_processes(settings)
    if size == 1 or processes.launched():
        from regauge.training.run import attempt

        return attempt(settings, processes.world())
    folder = Path(settings.output.folder)
    request = verbs.save_request(settings, folder)
    command = [sys.executable, "-m", "regauge", "train", str(request)]
    code = processes.start(command, size, folder / "ranks")
    if code:
        raise ChildError(code, f"see {folder / 'ranks'}, then start the same command again")
    return result_of(settings)
