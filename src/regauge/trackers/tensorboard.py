"""Metrics for TensorBoard, in the run's folder `tensorboard`.

A resumed run goes on in the same curves: what the lost steps had written is purged.
"""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Self

from pydantic import Field, PrivateAttr, model_validator

from regauge.errors import SettingsError
from regauge.trackers import RunFacts, Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Scalars as TensorBoard event files."""

    flush_seconds: int = Field(default=30, ge=1)
    """Longest time that a value waits in memory."""

    _writer: SummaryWriter | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _is_installed(self) -> Self:
        if importlib.util.find_spec("tensorboard") is None:
            raise SettingsError(
                "the tracker 'tensorboard' needs the package tensorboard",
                'pip install "regauge[tensorboard]", or leave the tracker out',
            )
        return self

    def start(self, run: RunFacts) -> None:
        """Open an event file; on a resume, hide the steps that will be run again."""
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(
            str(run.folder / FOLDER),
            purge_step=_first_step(run),
            flush_secs=self.flush_seconds,
        )
        if run.attempt == 1:
            self._note("settings", run.settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write each value under its own name."""
        if self._writer:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def finish(self, summary: Mapping[str, object]) -> None:
        """Write the result as text beside the settings."""
        self._note("summary", summary)

    def close(self) -> None:
        """Write out what waits in memory and end the writer's thread."""
        if self._writer:
            self._writer.close()
        self._writer = None

    def _note(self, name: str, values: Mapping[str, object]) -> None:
        if self._writer:
            text = json.dumps(values, indent=2, default=str)
            self._writer.add_text(name, f"```json\n{text}\n```")


def _first_step(run: RunFacts) -> int | None:
    """Return the step from which earlier events are hidden; 0 where nothing had been saved."""
    if run.attempt == 1:
        return None
    return run.resumed_step + 1 if run.resumed_step else 0
