"""Shows metrics as a live progress bar on a terminal, or as plain lines otherwise.

Both are printed to standard error. The bar stays below all other lines.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PrivateAttr

from regauge.monitoring.trackers import RunInfo, Tracker, is_train_metric
from regauge.monitoring.trackers._formatting import (
    Eta,
    format_duration,
    format_eval_metrics,
    format_train_metrics,
)
from regauge.system import log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.monitoring.trackers._live import LiveDisplay


class Console(Tracker):
    """A live progress bar on a terminal, or one plain line for each call."""

    peer_names: ClassVar[tuple[str, ...]] = ("stdout", "print")

    style: Literal["auto", "lines"] = "auto"
    """`auto` draws a progress bar if standard error is a terminal; `lines` prints plain lines."""

    _eta: Eta | None = PrivateAttr(default=None)
    _display: LiveDisplay | None = PrivateAttr(default=None)
    _start_seconds: float = PrivateAttr(default=0.0)
    _figures: str = PrivateAttr(default="")

    def start(self, run: RunInfo) -> None:
        """Draw the bar at the step from which the run resumes, if there is a terminal."""
        self.close()
        self._eta = Eta(run.total_steps, run.resumed_step)
        self._start_seconds = time.monotonic()
        if self.style == "auto" and log.is_interactive():
            self._display = _open_display(run)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show training metrics in the bar, and evaluation metrics as a permanent line."""
        if self._eta is None:
            return
        train = {name: value for name, value in values.items() if is_train_metric(name)}
        evaluation = {name: value for name, value in values.items() if name not in train}
        self._eta.record_step(step, time.monotonic())
        progress, eta = self._eta.format_progress(), self._eta.format_eta()
        if evaluation:
            log.print_line(f"step {progress}  {format_eval_metrics(evaluation)}")
        self._figures = format_train_metrics(train) if train else self._figures
        if self._display:
            self._display.show(step, progress + eta, self._figures)
        elif train:
            log.print_line(f"step {progress}  {self._figures}{eta}")

    def finish(self, summary: Mapping[str, object]) -> None:  # noqa: ARG002  (the verb shows it)
        """Remove the bar and print this attempt's duration; the verb shows the result."""
        if self._eta is None:
            return
        duration = format_duration(time.monotonic() - self._start_seconds)
        line = f"finished at step {self._eta.format_progress()} after {duration}  {self._figures}"
        self.close()
        log.print_line(line.rstrip())

    def close(self) -> None:
        if self._display:
            self._display.stop()
        self._display = None
        self._eta = None


def _open_display(run: RunInfo) -> LiveDisplay | None:
    """Open the live display; returns None if another one already uses the terminal."""
    from rich.errors import LiveError

    from regauge.monitoring.trackers._live import LiveDisplay

    try:
        return LiveDisplay(run.name, run.total_steps, run.resumed_step)
    except LiveError:
        return None
