"""Resolves the settings that follow from a run's data and start weights; no torch here.

The command resolves them before it starts processes, and every process does so again: a run that
was restarted on other nodes finds its id and its first decisions in `run.json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.system.errors import SettingsError
from regauge.training import run_record, task_schedule
from regauge.training.optimizer_defaults import resolve_optimizer

if TYPE_CHECKING:
    from regauge.data.dataset import DatasetManifest
    from regauge.training.optimizer_defaults import OptimizerDefaults
    from regauge.training.settings import TrainSettings


@dataclass(frozen=True)
class ResolvedData:
    """Settings with resolved tasks and optimizer, and the datasets behind them."""

    settings: TrainSettings
    manifests: list[DatasetManifest]
    """One per task."""
    optimizer_defaults: OptimizerDefaults

    @property
    def fingerprint(self) -> str:
        """Hash over all rows and their order."""
        return task_schedule.data_fingerprint(self.manifests)

    def find_run_id(self) -> str:
        """Return the id of the run in the output folder; a new one for a new folder.

        Raises SettingsError if the folder belongs to another run.
        """
        folder = Path(self.settings.output.folder)
        return run_record.check_same_run(folder, self.settings, self.fingerprint)


def resolve_data(settings: TrainSettings) -> ResolvedData:
    """Read the datasets, and resolve tasks and optimizer.

    Raises DataError or SettingsError for a dataset that a task cannot train on.
    """
    manifests = task_schedule.read_manifests(settings)
    for config, manifest in zip(settings.task_configs, manifests, strict=True):
        if manifest.splits["train"].rows == 0:
            raise SettingsError(f"{config.data.path} has no training rows", "prepare more text")
    settings, defaults = resolve_optimizer(task_schedule.resolve_tasks(settings, manifests))
    return ResolvedData(settings, manifests, defaults)
