"""Shows metrics as a live progress bar on a terminal, or as plain lines otherwise.

Both are printed to standard error. The bar stays below all other lines.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PrivateAttr

from regauge.monitoring.trackers import RunInfo, Tracker, is_train_metric
from regauge.system import log
from regauge.system.wording import format_metric, format_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from regauge.monitoring.trackers._live import LiveDisplay

WINDOW_LINES = 20
"""Lines over which speed is measured; they span evaluations and checkpoints."""


class Eta:
    """A run's progress and estimated remaining time; the caller provides the time."""

    def __init__(self, total_steps: int | None, step: int) -> None:
        self.total_steps = total_steps
        self.step = step
        self._samples: deque[tuple[int, float]] = deque(maxlen=WINDOW_LINES)

    def record_step(self, step: int, now: float) -> None:
        """Record when a step ended, in seconds on any clock."""
        self.step = step
        if not self._samples or self._samples[-1][0] < step:
            self._samples.append((step, now))

    def format_progress(self) -> str:
        """Return `step/total`, or only the step if the total is not known."""
        return f"{self.step}" if self.total_steps is None else f"{self.step}/{self.total_steps}"

    def seconds_left(self) -> float | None:
        """Return the seconds until the last step; None before two steps were recorded.

        The time before the first recorded step is ignored, because it includes the compilation.
        """
        if self.total_steps is None or len(self._samples) < 2:  # noqa: PLR2004  (a speed needs two)
            return None
        (first_step, start), (last_step, end) = self._samples[0], self._samples[-1]
        steps_left = max(self.total_steps - self.step, 0)
        return steps_left * (end - start) / (last_step - first_step)

    def format_eta(self) -> str:
        """Return `  eta h:mm:ss`, or an empty text while it is unknown."""
        seconds = self.seconds_left()
        return "" if seconds is None else f"  eta {format_duration(seconds)}"


def format_train_metrics(values: Mapping[str, float]) -> str:
    """Format training metrics, as `loss 3.214  lr 4.8e-04  12,345 tok/s`.

    In a multi-task run the losses of the tasks follow their mean in parentheses.
    """
    metrics = {name.removeprefix("train/"): value for name, value in values.items()}
    parts = [
        format_value(metrics[name])
        for name, format_value in _TRAIN_FORMATS.items()
        if name in metrics
    ]
    task_losses = [
        f"{name.removeprefix('train.').removesuffix('/loss')} {format_number(value)}"
        for name, value in values.items()
        if name.startswith("train.")
    ]
    losses = [f"({', '.join(task_losses)})"] if task_losses else []
    return "  ".join([*parts[:1], *losses, *parts[1:]])


def format_eval_metrics(values: Mapping[str, float]) -> str:
    """Format evaluation metrics, as `heldout: loss 2.914  recall@10 0.787`."""
    parts = (
        (*name.rpartition("/")[::2], format_metric(name, value)) for name, value in values.items()
    )
    return "  ".join(
        (f"{split}: " if split else "") + "  ".join(f"{name} {text}" for _, name, text in items)
        for split, items in groupby(parts, key=lambda part: part[0])
    )


def format_dollars(value: float) -> str:
    """Format an amount with two decimals, or with four below one dollar."""
    return f"${value:,.2f}" if value >= 1 else f"${value:.4f}"


def format_duration(seconds: float) -> str:
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}"


_TRAIN_FORMATS: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {format_number(value)}",
    "learning_rate": lambda value: f"lr {value:.1e}",
    "tokens_per_second": lambda value: f"{value:,.0f} tok/s",
    "mfu": lambda value: f"mfu {value:.1%}",
    "usd": format_dollars,
}
"""Training metrics shown on the console; other trackers record all metrics."""


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
