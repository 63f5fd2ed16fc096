"""Writes metrics as JSON lines in the run folder, for `report` and other programs.

`metrics.jsonl` is append-only. Each line is `{"attempt", "step", "seconds", …values}`; `seconds`
counts from the start of the attempt. A finished run adds a line with a `summary` instead of values.
If several attempts contain a step, the last attempt is valid. JSON does not have NaN: such a value
is null, and the key with `_text` names it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from pydantic import PrivateAttr

from regauge.config.output_files import METRICS
from regauge.monitoring.trackers import RunInfo, Tracker
from regauge.system import jsonl

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import FileIO


class Jsonl(Tracker):
    """One JSON line for each call, in `metrics.jsonl`."""

    _file: FileIO | None = PrivateAttr(default=None)
    _attempt: int = PrivateAttr(default=1)
    _step: int = PrivateAttr(default=0)
    _start_seconds: float = PrivateAttr(default=0.0)

    def start(self, run: RunInfo) -> None:
        self.close()
        run.folder.mkdir(parents=True, exist_ok=True)
        self._file = jsonl.open_for_append(run.folder / METRICS)
        self._attempt, self._step = run.attempt, run.resumed_step
        self._start_seconds = time.monotonic()

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Write one line; the operating system has all of it when this method returns."""
        self._step = step
        if self._file:
            seconds = round(time.monotonic() - self._start_seconds, 3)
            line = {"attempt": self._attempt, "step": step, "seconds": seconds}
            jsonl.write_line(self._file, line | dict(values))

    def finish(self, summary: Mapping[str, object]) -> None:
        self.log(self._step, {"summary": dict(summary)})

    def close(self) -> None:
        """Flush the lines to the disk and close the file."""
        if self._file:
            os.fsync(self._file.fileno())
            self._file.close()
        self._file = None
