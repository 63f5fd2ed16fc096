"""Selects the reader of a target: an output folder, a job handle or the address of a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from regauge.jobs.targets import SEPARATOR, Handle
from regauge.run_folders.node_status import RANKS
from regauge.run_folders.run_folder import find_stage_folders
from regauge.run_folders.run_tail import is_any_run, is_predict_folder, read_run_tail
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from regauge.commands._top.snapshot import SnapshotReader

SCHEMES = ("http://", "https://")


def open_reader(target: str) -> SnapshotReader:
    """Return the reader of a target.

    Raises SettingsError for a folder without a run, and for a handle that no launcher knows.
    """
    if target.startswith(SCHEMES):
        from regauge.commands._top.server_reader import ServerReader

        return ServerReader(target)
    if SEPARATOR in target:
        from regauge.commands._top.job_reader import JobReader

        return JobReader(Handle.parse(target), open_folder)
    return open_folder(Path(target))


def open_folder(folder: Path) -> SnapshotReader:
    """Return the reader of an output folder; of a pipeline, the stage that runs or ran last."""
    if not folder.is_dir():
        raise SettingsError(f"no folder {folder}", "name the output folder of a run")
    if not (is_any_run(folder) or (folder / RANKS).is_dir()):
        folder = _find_stage(folder)
    if is_predict_folder(folder):
        from regauge.commands._top.predict_reader import PredictReader

        return PredictReader(folder)
    from regauge.commands._top.training_reader import TrainingReader

    return TrainingReader(folder)


def _find_stage(folder: Path) -> Path:
    stages = find_stage_folders(folder)
    if not stages:
        remedy = "name the output folder of a run; `regauge runs` lists them"
        raise SettingsError(f"{folder} contains no run", remedy)
    running = [stage for stage in stages if read_run_tail(stage).is_locked]
    return [*stages, *running][-1]
