"""Metrics for the person who watches: a live bar on a terminal, plain lines elsewhere.

Both go to standard error. The bar redraws itself below whatever else is printed there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from pydantic import PrivateAttr

from regauge import log
from regauge.trackers import RunFacts, Tracker, of_training
from regauge.trackers._words import Pace, duration, evaluation, training

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.trackers._live import Live


class Console(Tracker):
    """A live bar on a terminal, one plain line per call elsewhere."""

    style: Literal["auto", "lines"] = "auto"
    """`auto` draws a bar where standard error is a terminal; `lines` never does."""

    _pace: Pace | None = PrivateAttr(default=None)
    _live: Live | None = PrivateAttr(default=None)
    _began: float = PrivateAttr(default=0.0)
    _figures: str = PrivateAttr(default="")

    def start(self, run: RunFacts) -> None:
        """Draw the bar where there is a terminal, at the step that the run goes on from."""
        self.close()
        self._pace = Pace(run.total_steps, run.resumed_step)
        self._began = time.monotonic()
        if self.style == "auto" and log.interactive():
            self._live = _drawn(run)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show a line of training in the bar, and any other values as a line that stays."""
        if self._pace is None:
            return
        train = {name: value for name, value in values.items() if of_training(name)}
        others = {name: value for name, value in values.items() if name not in train}
        self._pace.seen(step, time.monotonic())
        if others:
            _say(f"step {self._pace.progress()}  {evaluation(others)}")
        self._figures = training(train) if train else self._figures
        if self._live:
            self._live.show(step, self._pace.progress() + self._pace.eta(), self._figures)
        elif train:
            _say(f"step {self._pace.progress()}  {self._figures}{self._pace.eta()}")

    def finish(self, summary: Mapping[str, object]) -> None:  # noqa: ARG002  (the verb shows it)
        """Take the bar away and say how long this attempt took; the verb shows the result."""
        if self._pace is None:
            return
        took = duration(time.monotonic() - self._began)
        line = f"finished at step {self._pace.progress()} after {took}  {self._figures}"
        self.close()
        _say(line.rstrip())

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live:
            self._live.stop()
        self._live = None
        self._pace = None


def _drawn(run: RunFacts) -> Live | None:
    """Return the bar, or None where another progress display has the terminal."""
    from rich.errors import LiveError

    from regauge.trackers._live import Live

    try:
        return Live(run.name, run.total_steps, run.resumed_step)
    except LiveError:
        return None


def _say(line: str) -> None:
    log.stderr.print(line, markup=False)
