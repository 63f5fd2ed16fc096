"""The live bar of the console tracker: one line of progress, one line of figures."""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from regauge import log

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

REFRESH_PER_SECOND = 4
"""Slow enough to cost a training process nothing."""


class _TwoLines(Progress):
    """A bar with a second line that the columns need not share."""

    figures: str = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(f"  {self.figures}", style="dim", no_wrap=True, overflow="ellipsis")


class Live:
    """A bar on the terminal from its construction until `stop`.

    The process may end in any way that Python sees, and the terminal has its cursor back.
    """

    def __init__(self, name: str, total_steps: int | None, step: int) -> None:
        self._progress = _TwoLines(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[progress]}", markup=False),
            TimeElapsedColumn(),
            console=log.stderr,
            refresh_per_second=REFRESH_PER_SECOND,
            transient=True,
            expand=True,
            # Standard output is the answer's: only where both are the same screen may rich
            # print it above the bar.
            redirect_stdout=sys.stdout.isatty(),
        )
        start = "starting" if total_steps is None else f"{step}/{total_steps}"
        self._bar = self._progress.add_task(name, total=total_steps, completed=step, progress=start)
        self._progress.figures = "waiting for the first line of metrics"
        atexit.register(self.stop)  # first: Ctrl-C may come in the middle of the start
        self._progress.start()

    def show(self, step: int, progress: str, figures: str) -> None:
        """Move the bar to a step and show its figures."""
        self._progress.figures = figures
        self._progress.update(self._bar, completed=step, progress=progress)

    def stop(self) -> None:
        """Take the bar away, end its thread and give the cursor back."""
        self._progress.stop()
        atexit.unregister(self.stop)
