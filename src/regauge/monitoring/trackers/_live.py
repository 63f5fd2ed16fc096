"""The console tracker's live display: a progress bar and a metrics line."""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from regauge.system import log

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

REFRESH_PER_SECOND = 4
"""Low enough to cost the training process nothing."""


class _TwoLineProgress(Progress):
    """A progress bar with a second line below the columns."""

    figures: str = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(f"  {self.figures}", style="dim", no_wrap=True, overflow="ellipsis")


class LiveDisplay:
    """A progress bar on the terminal, from construction until `stop`.

    An exit handler restores the terminal cursor if `stop` is not called.
    """

    def __init__(self, name: str, total_steps: int | None, step: int) -> None:
        self._progress = _TwoLineProgress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[progress]}", markup=False),
            TimeElapsedColumn(),
            console=log.stderr,
            refresh_per_second=REFRESH_PER_SECOND,
            transient=True,
            expand=True,
            # Standard output contains only the answer. rich may print it above the bar only if
            # it is a terminal, too.
            redirect_stdout=sys.stdout.isatty(),
        )
        start = "starting" if total_steps is None else f"{step}/{total_steps}"
        self._bar = self._progress.add_task(name, total=total_steps, completed=step, progress=start)
        self._progress.figures = "waiting for the first line of metrics"
        atexit.register(self.stop)  # before `start`, which Ctrl-C may interrupt
        self._progress.start()

    def show(self, step: int, progress: str, figures: str) -> None:
        """Move the bar to a step and show the metrics."""
        self._progress.figures = figures
        self._progress.update(self._bar, completed=step, progress=progress)

    def stop(self) -> None:
        """Remove the bar, end its thread and restore the cursor."""
        self._progress.stop()
        atexit.unregister(self.stop)
