"""Metrics as lines of JSON in the run's folder, for machines and for `report`.

`metrics.jsonl` is only ever appended to. Each line is `{"attempt", "step", "seconds", …values}`,
where `seconds` counts from the start of the attempt; a run that ends adds one line with its
`summary` in place of values. Where attempts repeat a step, the last attempt is the one that
counts. JSON has no NaN: such a value is the text "NaN", "Infinity" or "-Infinity".
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr

from regauge import jsonl
from regauge.trackers import RunFacts, Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import FileIO

FILE = "metrics.jsonl"


class Jsonl(Tracker):
    """One line of JSON per call, in `metrics.jsonl`."""

    _lines: _Lines | None = PrivateAttr(default=None)

    def start(self, run: RunFacts) -> None:
        """Open the file at its end."""
        self.close()
        run.folder.mkdir(parents=True, exist_ok=True)
        self._lines = _Lines(jsonl.opened(run.folder / FILE), run.attempt, run.resumed_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line, complete when this returns."""
        if self._lines:
            self._lines.write(step, values)

    def finish(self, summary: Mapping[str, object]) -> None:
        """Write the line that says that the run reached its end."""
        if self._lines:
            self._lines.write(self._lines.step, {"summary": dict(summary)})

    def close(self) -> None:
        """Bring the lines to the disk and close the file."""
        if self._lines:
            self._lines.close()
        self._lines = None


@dataclass
class _Lines:
    """The file between start and close."""

    file: FileIO
    attempt: int
    step: int

    def __post_init__(self) -> None:
        self.began = time.monotonic()

    def write(self, step: int, values: Mapping[str, object]) -> None:
        self.step = step
        seconds = round(time.monotonic() - self.began, 3)
        line = {"attempt": self.attempt, "step": step, "seconds": seconds, **_strict(values)}
        jsonl.write(self.file, line)

    def close(self) -> None:
        os.fsync(self.file.fileno())
        self.file.close()


def _strict(value: Any) -> Any:
    """Return the value with every number JSON cannot write as the text that names it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
