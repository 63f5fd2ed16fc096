"""Finds a folder's run, and the task that its model was trained on.

This module does not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from regauge.config import build, read_saved_run
from regauge.config.output_files import SAVED_RUN
from regauge.inference.export.artifact import is_artifact, open_unchecked
from regauge.training.run_record import TASKS
from regauge.training.settings import TaskConfig, TrainSettings


class RunTask(NamedTuple):
    """A run's task and settings."""

    run: Path
    """Run folder."""
    config: TaskConfig
    settings: TrainSettings


def find_trained_task(folder: Path) -> RunTask | None:
    """Return the task of the model in a folder; None if the folder is not from a run.

    `folder` is a run, a run's model or an artifact. A run with several tasks gives the first one,
    unless the folder belongs to another. Raises DataError for a damaged run.
    """
    folders = [folder.resolve()]
    if is_artifact(folder):
        folders.append(Path(open_unchecked(folder).manifest.origin.path).resolve())
    for start in folders:
        for parent in (start, *start.parents[:3]):
            if (parent / SAVED_RUN).is_file():
                return _select_task(parent, start.relative_to(parent).parts)
    return None


def _select_task(run: Path, parts: tuple[str, ...]) -> RunTask:
    """Return the task whose folder `parts` lead to, relative to the run folder."""
    settings = build(TrainSettings, read_saved_run(run))
    name = parts[1] if parts[:1] == (TASKS,) and len(parts) > 1 else ""
    configs = settings.task_configs
    selected = next((config for config in configs if config.name == name), configs[0])
    return RunTask(run, selected, settings)
