"""Finds a folder's run, and the task that its model was trained on.

This module does not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from regauge.config import build, read_saved_run
from regauge.data.dataset import read_manifest
from regauge.inference.export.artifact import is_artifact, open_unchecked
from regauge.run_folders.run_folder import find_working_folder, locate_run
from regauge.system.log import logger
from regauge.training.run_record import TASKS
from regauge.training.settings import TaskConfig, TrainSettings

if TYPE_CHECKING:
    from regauge.models.io_spec import InputSpec
    from regauge.tasks import Task


class TrainedTask(NamedTuple):
    """A run's task and settings."""

    run: Path
    """Run folder."""
    config: TaskConfig
    settings: TrainSettings

    @property
    def task(self) -> Task:
        return self.config.task

    @property
    def dataset(self) -> Path:
        """Training dataset."""
        base = find_working_folder(self.run, self.settings.output.folder)
        return base / self.config.data.path

    @property
    def input_spec(self) -> InputSpec:
        """Record fields for the model to read."""
        return self.task.input_spec(read_manifest(self.dataset))


def find_trained_task(folder: Path) -> TrainedTask | None:
    """Return the task of the model in a folder; None if the folder is not from a run.

    `folder` is a run, a run's model or an artifact. A run with several tasks gives the first one,
    unless the folder belongs to another. Raises DataError for a damaged run.
    """
    located = locate_run(str(folder.resolve()), folder)
    if located is None and is_artifact(folder):
        origin = open_unchecked(folder).manifest.origin
        located = locate_run(origin.path, folder, origin.run_id)
    if located is None:
        return None
    run, start = located
    return _select_task(run, start.relative_to(run).parts)


def _select_task(run: Path, parts: tuple[str, ...]) -> TrainedTask:
    """Return the task whose folder `parts` lead to, relative to the run folder."""
    settings = build(TrainSettings, read_saved_run(run))
    name = parts[1] if parts[:1] == (TASKS,) and len(parts) > 1 else ""
    configs = settings.task_configs
    selected = next((config for config in configs if config.name == name), configs[0])
    return TrainedTask(run, selected, settings)


def find_task_with_dataset(run: Path) -> TrainedTask | None:
    """Return a run's task; None, with a warning, if its dataset is missing."""
    trained = find_trained_task(run)
    if trained is None or trained.dataset.is_dir():
        return trained
    warning = "dataset %s is missing: the fields and token limits of the task are unknown"
    logger.warning(warning, trained.dataset)
    return None
