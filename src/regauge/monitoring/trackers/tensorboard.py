"""Writes metrics for TensorBoard, to the run's `tensorboard` folder.

Each attempt writes one file. A resumed attempt purges the steps after its checkpoint, and writes
earlier ones lost by a killed attempt.
"""

from __future__ import annotations

import io
import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from regauge.monitoring.trackers._earlier_attempts import deliver_once
from regauge.monitoring.trackers._service import FINISHED, ServiceTracker

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from regauge.monitoring.trackers import RunInfo
    from regauge.monitoring.trackers._service import Deliver, MetricsLine

FOLDER = "tensorboard"
FILE_VERSION = "brain.Event:2"


class TensorBoard(ServiceTracker):
    """Scalars as TensorBoard event files."""

    peer_names: ClassVar[tuple[str, ...]] = ("tb",)

    wait_seconds: float = Field(default=2.0, ge=0)
    """Maximum wait at the end of the run for values not yet written."""

    def list_packages(self) -> tuple[str, ...]:
        return ("tensorboard",)

    def name_destination(self, run: RunInfo) -> str:
        return f"tensorboard in {run.folder / FOLDER}"

    def connect(self, run: RunInfo) -> Deliver:
        """Open an event file; after a resume, purge the steps to be repeated."""
        folder = run.folder / FOLDER
        file = EventFile(folder, _find_purge_step(run))
        try:
            recorded = _list_recorded(folder) if run.attempt > 1 else ()
            if run.attempt == 1 or not run.resumed_step:
                file.write([_build_text("settings", run.settings)])
            return deliver_once(file.deliver, recorded, str, run)
        except OSError:
            file.close()
            raise

    def is_permanent(self, error: Exception) -> bool:
        return not isinstance(error, OSError)


class EventFile:
    """An event file that contains only whole deliveries, even after disk errors."""

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        """Create the file; TensorBoard drops earlier events from `purge_step` on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # Readers open the files of a folder in the order of their names.
        name = f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("xb", buffering=0)
        events = [Event(wall_time=now, file_version=FILE_VERSION)]
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            events.append(Event(wall_time=now, step=purge_step, session_log=start))
        try:
            self.write(events)
        except OSError:
            self.close()
            raise

    def deliver(self, lines: list[MetricsLine]) -> None:
        """Write lines; a run's last line ends the file."""
        if self._file.closed:
            return
        self.write([event for line in lines for event in _build_events(line)])
        if any(line.final_status for line in lines):
            self.close()

    def write(self, events: list[Any]) -> None:
        """Write events; after a disk error the file is as before.

        The operating system has all of them when this method returns.
        """
        from tensorboard.summary.writer.record_writer import RecordWriter

        buffer = io.BytesIO()
        records = RecordWriter(buffer)
        for event in events:
            records.write(event.SerializeToString())
        start, data = self._file.tell(), buffer.getvalue()
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError:
            self._file.truncate(start)
            self._file.seek(start)
            raise

    def close(self) -> None:
        self._file.close()


def _build_events(line: MetricsLine) -> list[Any]:
    """Return a scalar for each value; the run's result is a text, next to the settings."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    if line.final_status:
        items = {**line.values, **line.tags}.items()
        result = {name[len("result/") :]: item for name, item in items}
        return [_build_text("summary", result)] if line.final_status == FINISHED else []
    values = [Summary.Value(tag=name, simple_value=value) for name, value in line.values.items()]
    return [Event(wall_time=line.timestamp, step=line.step, summary=Summary(value=values))]


def _build_text(name: str, values: dict[str, Any]) -> Any:
    """Return an event that shows values as JSON."""
    from tensorboard.compat.proto.event_pb2 import Event
    from torch.utils.tensorboard.summary import text

    content = f"```json\n{json.dumps(values, indent=2, default=str)}\n```"
    return Event(wall_time=time.time(), summary=text(name, content))


def _find_purge_step(run: RunInfo) -> int | None:
    """Return the step from which earlier events are purged; None in the first attempt.

    All events are purged, from step 0, if the earlier attempt saved no checkpoint.
    """
    if run.attempt == 1:
        return None
    return run.resumed_step + 1 if run.resumed_step else 0


def _list_recorded(folder: Path) -> Collection[tuple[str, int]]:
    """Return names and steps for unpurged scalars from earlier attempts."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    recorded: set[tuple[str, int]] = set()
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            if event.HasField("session_log"):
                recorded = {(name, step) for name, step in recorded if step < event.step}
            recorded |= {(value.tag, event.step) for value in event.summary.value}
    return recorded
