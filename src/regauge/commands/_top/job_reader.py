"""Reads the snapshot of a launched job: the state of its scheduler, and its run."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.commands._top.snapshot import (
    Column,
    Figure,
    FigureGroup,
    Snapshot,
    TableRow,
    ViewTable,
)
from regauge.jobs.planning import select_launcher
from regauge.jobs.settings import Launch
from regauge.jobs.targets import is_local_folder
from regauge.run_folders.run_tail import is_any_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.commands._top.snapshot import SnapshotReader
    from regauge.jobs.targets import Handle, JobStatus

COLUMNS = (
    Column("node", "NODE", "number"),
    Column("state", "STATE", "text"),
    Column("host", "HOST", "text"),
    Column("exit_code", "EXIT CODE", "number"),
    Column("reason", "REASON", "text"),
)
PROBLEM_STATES = ("failed", "preempted", "unknown")


class JobReader:
    """Reads a job of `launch`; `open_run` returns the reader of its output folder."""

    poll_seconds = 2.0

    def __init__(self, handle: Handle, open_run: Callable[[Path], SnapshotReader]) -> None:
        self._handle = handle
        self._launcher = select_launcher(Launch(), handle.target)
        self._open_run = open_run
        self._run: SnapshotReader | None = None

    def read(self) -> Snapshot:
        """Return the present state; raises TransientError if the scheduler does not answer."""
        status = self._launcher.find_status(self._handle)
        folder = Path(status.output)
        if self._run is None and is_local_folder(status.output) and is_any_run(folder):
            self._run = self._open_run(folder)
        if self._run is None:
            return _describe_job(status)
        snapshot = self._run.read()
        facts = (str(self._handle), *snapshot.facts)
        state = status.state if status.state != "succeeded" else snapshot.state
        reason = status.reason if state != "running" else snapshot.reason
        return replace(snapshot, state=state, reason=reason or snapshot.reason, facts=facts)


def _describe_job(status: JobStatus) -> Snapshot:
    """Return the snapshot of a job whose output folder this machine cannot read."""
    rows = tuple(
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
    )
    figures = (
        Figure("usd_per_hour", "per hour", status.usd_per_hour, "dollars"),
        Figure("attempt", "attempt", status.attempt),
        Figure("submitted_at", "submitted", status.submitted_at, "text"),
        Figure("started_at", "started", status.started_at, "text"),
        Figure("exit_code", "exit code", status.exit_code),
    )
    return Snapshot(
        name=status.handle.job_id,
        verb="job",
        state=status.state,
        read_at=time.time(),
        reason=status.reason,
        facts=(str(status.handle),),
        groups=(FigureGroup("Job", figures),),
        table=ViewTable("Nodes", COLUMNS, rows),
    )
