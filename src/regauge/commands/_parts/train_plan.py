"""Dry run of `train`, and the checks before the start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import accelerators, config
from regauge.commands._parts.default_tables import complete_tables
from regauge.data.dataset import Dataset
from regauge.data.unprepared import describe_datasets, find_rows, is_prepared
from regauge.planner.run_plans.job_forecast import forecast_job
from regauge.supervision.nodes.topology import is_whole_node
from regauge.system import hub, processes
from regauge.system.garbage import pause_collection
from regauge.system.log import logger
from regauge.training import dry_run, warm_start
from regauge.training.batch_finder.model_size import describe_model
from regauge.training.defaults import check_device

if TYPE_CHECKING:
    from regauge.data.unprepared import RowsByFolder
    from regauge.training.settings import TrainSettings


def plan_training(settings: TrainSettings, dataset_rows: RowsByFolder) -> dict[str, Any]:
    """Return a run's plan; torch is imported last, and only if the model must be built."""
    answer = dry_run.plan_run(settings) | _forecast(settings, dataset_rows)
    if reason := dry_run.find_count_obstacle(settings, dataset_rows):
        return {**answer, "parameters": f"unknown: {reason}"}
    with pause_collection(), hub.local_only():
        answer |= describe_model(settings, dataset_rows)
        if settings.batch.microbatch_rows == "auto":
            from regauge.training.batch_finder.finder import describe_forecast

            answer["microbatch_rows"] = describe_forecast(settings)
    return answer


def _forecast(settings: TrainSettings, dataset_rows: RowsByFolder) -> dict[str, Any]:
    """Return the `regauge plan` numbers for the configured machine type, if any."""
    instance, nodes = settings.execution.price.instance, settings.execution.nodes.count
    tables = config.dump(settings)
    if (rows := find_rows(dataset_rows, settings.task_configs[0].data.path)) is not None:
        tables["rows"] = config.dump(rows)
    forecast = forecast_job(tables, Path(settings.output.folder), instance, nodes)
    return {"forecast": forecast} if forecast else {}


def read_dataset_rows(
    settings: TrainSettings, run_file: Path, overrides: tuple[str, ...]
) -> RowsByFolder:
    """Return the row layouts declared in a run file; empty if all datasets are prepared.

    Overrides of `data` may name another folder than the one that `prepare` writes. So the layouts
    are returned for the folders with and without these overrides.
    """
    if all(is_prepared(Path(task_config.data.path)) for task_config in settings.task_configs):
        return {}
    tables = config.read(run_file)
    other_overrides = tuple(text for text in overrides if not text.startswith("data."))
    versions = (
        complete_tables(config.apply_overrides(tables, texts, type(settings)))
        for texts in (other_overrides, overrides)
    )
    return dict(item for version in versions for item in describe_datasets(version).items())


def check_before_start(settings: TrainSettings) -> dict[str, Any] | None:
    """Check a run before its processes start, and download the weights that it starts from.

    Returns the result of an already finished run, otherwise None. Raises DataError if a dataset
    file has changed since `prepare` wrote it.
    """
    manifests = dry_run.check_run(settings)
    if result := dry_run.find_finished(settings, manifests):
        logger.info("%s", dry_run.describe_finished(settings, result))
        return result
    dry_run.warn_about_length(settings, manifests[0])
    _check_device(settings)
    is_rank = processes.is_launched() and not is_whole_node(settings.execution.nodes)
    if not is_rank or processes.detect_world().local_rank == 0:
        _verify_datasets(settings)
    if (path := warm_start.use_copied_weights(settings).model.path) is not None:
        hub.resolve_model(path)
    return None


def _check_device(settings: TrainSettings) -> None:
    """Check the device and the strategy here if torch is not needed; otherwise each rank does."""
    accelerator = settings.accelerator or accelerators.choose_without_torch()
    is_cpu = accelerator is not None and accelerator.kind == "cpu"
    if is_cpu and not processes.is_launched():
        check_device(settings)


def _verify_datasets(settings: TrainSettings) -> None:
    tables = [task.data for task in settings.task_configs if task.data.verify_shards]
    for path in dict.fromkeys(path for data in tables for path in data.paths):
        Dataset(Path(path)).verify()
