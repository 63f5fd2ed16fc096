"""Writes metrics as JSON lines in the run folder, for `report` and other programs.

`metrics.jsonl` is append-only. Each line is `{"attempt", "step", "seconds", …values}`; `seconds`
counts from the start of the attempt. A finished run adds a line with a `summary` instead of values.
If several attempts contain a step, the last attempt is valid. JSON does not have NaN: such a value
is the text "NaN", "Infinity" or "-Infinity".
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr

from regauge.config.output_files import METRICS
from regauge.monitoring.trackers import RunInfo, Tracker
from regauge.system import jsonl

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import FileIO


class Jsonl(Tracker):
    """One JSON line for each call, in `metrics.jsonl`."""

    _file: _MetricsFile | None = PrivateAttr(default=None)

    def start(self, run: RunInfo) -> None:
        self.close()
        run.folder.mkdir(parents=True, exist_ok=True)
        file = jsonl.open_for_append(run.folder / METRICS)
        self._file = _MetricsFile(file, run.attempt, run.resumed_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line; the operating system has all of it when this method returns."""
        if self._file:
            self._file.write(step, values)

    def finish(self, summary: Mapping[str, object]) -> None:
        if self._file:
            self._file.write(self._file.step, {"summary": dict(summary)})

    def close(self) -> None:
        """Flush the lines to the disk and close the file."""
        if self._file:
            self._file.close()
        self._file = None


@dataclass
class _MetricsFile:
    """The open file, with the attempt and the last step."""

    file: FileIO
    attempt: int
    step: int

    def __post_init__(self) -> None:
        self.start_seconds = time.monotonic()

    def write(self, step: int, values: Mapping[str, object]) -> None:
        self.step = step
        seconds = round(time.monotonic() - self.start_seconds, 3)
        line = {"attempt": self.attempt, "step": step, "seconds": seconds}
        jsonl.write_line(self.file, line | _replace_non_finite(values))

    def close(self) -> None:
        os.fsync(self.file.fileno())
        self.file.close()


def _replace_non_finite(value: Any) -> Any:
    """Replace each NaN or infinity by its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return value
