"""Resolves what a run file leaves open, before anything is allocated.

The command resolves datasets, tasks and optimizer before it starts processes, and every process
does so again: a run that was restarted on other nodes finds its id and its first decisions in
`run.json`. One choice needs the model and follows during setup: whether blocks are compiled
(`compile/decision.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.system.errors import SettingsError
from regauge.system.log import logger
from regauge.training import run_record, task_schedule
from regauge.training.defaults import describe_precision, resolve_defaults
from regauge.training.optimizer_defaults import resolve_optimizer
from regauge.training.warm_start import resolve_warm_start

if TYPE_CHECKING:
    from regauge.config import Tables
    from regauge.data.dataset import DatasetManifest
    from regauge.supervision.channel import WorkerReporter
    from regauge.system.processes import World
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


@dataclass(frozen=True)
class ResolvedRun:
    """Settings with every choice resolved, and which run it is."""

    settings: TrainSettings
    data_fingerprint: str
    """Hash over all rows and their order."""
    run_id: str
    decisions: Tables
    """Decisions for open settings, with the figures behind them, for `run.json`."""


def resolve_run(settings: TrainSettings, world: World, reporter: WorkerReporter) -> ResolvedRun:
    """Resolve a run's settings; every process calls this.

    A choice is taken from the command or the run file, else from the first attempt, else by
    affinity or measurement. Raises SettingsError if the output folder belongs to another run.
    """
    from regauge.training.batch_finder.finder import resolve_microbatch

    folder = Path(settings.output.folder)
    settings = resolve_warm_start(settings, world, reporter)
    data = resolve_data(settings)
    defaults = data.optimizer_defaults
    if defaults.values and world.is_main_process:
        logger.info("optimizer: %s", defaults.description)
    run_id = data.find_run_id()
    settings = run_record.inherit_decisions(data.settings, folder)
    decisions = {run_record.DEFAULTS: defaults.document}
    has_open_precision = settings.execution.precision == "auto"
    settings = resolve_defaults(settings, world, reporter)
    if has_open_precision:
        decisions[run_record.PRECISION] = _describe_precision(settings)
    settings = resolve_microbatch(settings, world, reporter)
    return ResolvedRun(settings, data.fingerprint, run_id, decisions)


def _describe_precision(settings: TrainSettings) -> Tables:
    accelerator, precision = settings.accelerator, settings.execution.precision
    if accelerator is None or precision == "auto":  # `resolve_defaults` has resolved both
        return {}
    return {
        "chosen": precision,
        "reason": describe_precision(accelerator, precision),
        "speeds": dict(accelerator.precision_speeds()),
    }
