"""Selects a target's reader: an output folder, a launched job or a server address."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.commands._top.snapshot import Snapshot, TableRow
from regauge.config.output_files import RANKS
from regauge.jobs.planning import select_launcher
from regauge.jobs.settings import Launch
from regauge.jobs.targets import SEPARATOR, Handle, is_local_folder
from regauge.run_folders.run_folder import find_stage_folders
from regauge.run_folders.run_tail import is_any_run, is_predict_folder, read_run_tail
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from regauge.commands._top.snapshot import SnapshotReader
    from regauge.jobs.targets import JobStatus

SCHEMES = ("http://", "https://")
PROBLEM_STATES = ("failed", "preempted", "unknown")


def open_reader(target: str) -> SnapshotReader:
    """Return a target's reader.

    Raises SettingsError for a folder without a run, and for a handle unknown to all launchers.
    """
    if target.startswith(SCHEMES):
        from regauge.commands._top.server_reader import ServerReader

        return ServerReader(target)
    return JobReader(Handle.parse(target)) if SEPARATOR in target else open_folder(Path(target))


def open_folder(folder: Path) -> SnapshotReader:
    """Return an output folder's reader; for a pipeline, the stage that runs or ran last."""
    if not folder.is_dir():
        raise SettingsError(f"no folder {folder}", "name a run's output folder")
    if not (is_any_run(folder) or (folder / RANKS).is_dir()):
        stages = find_stage_folders(folder)
        if not stages:
            remedy = "name a run's output folder; `regauge runs` lists them"
            raise SettingsError(f"{folder} does not contain a run", remedy)
        folder = [*stages, *(stage for stage in stages if read_run_tail(stage).is_locked)][-1]
    if is_predict_folder(folder):
        from regauge.commands._top.predict_reader import PredictReader

        return PredictReader(folder)
    from regauge.commands._top.training_reader import TrainingReader

    return TrainingReader(folder)


class JobReader:
    """Reads a `launch` job: the scheduler's state, and the run if its folder is visible."""

    poll_seconds = 2.0

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._launcher = select_launcher(Launch(), handle.target)
        self._run: SnapshotReader | None = None

    def read(self) -> Snapshot:
        """Return the present state; raises TransientError if the scheduler does not answer."""
        status = self._launcher.find_status(self._handle)
        folder = Path(status.output)
        if self._run is None and is_local_folder(status.output) and is_any_run(folder):
            self._run = open_folder(folder)
        if self._run is None:
            return _describe_job(status)
        snapshot = self._run.read()
        facts = (str(self._handle), *snapshot.facts)
        state = status.state if status.state != "succeeded" else snapshot.state
        reason = status.reason if state != "running" else snapshot.reason
        return replace(snapshot, state=state, reason=reason or snapshot.reason, facts=facts)


def _describe_job(status: JobStatus) -> Snapshot:
    rows = [
        TableRow(
            {
                "node": node.index,
                "state": node.state,
                "host": node.host or None,
                "exit_code": node.exit_code,
                "reason": node.reason or None,
            },
            is_problem=node.state in PROBLEM_STATES,
        )
        for node in status.nodes
    ]
    names = ("usd_per_hour", "attempt", "submitted_at", "started_at", "exit_code")
    return Snapshot(
        name=status.handle.job_id,
        verb="job",
        state=status.state,
        read_at=time.time(),
        groups={"job": {name: getattr(status, name) for name in names}},
        table="nodes",
        rows=tuple(rows),
        reason=status.reason,
        facts=(str(status.handle),),
    )
