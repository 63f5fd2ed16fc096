"""Writes metrics for TensorBoard, to the folder `tensorboard` of the run.

A resumed run continues the same curves: the values of lost steps are purged.
"""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field, PrivateAttr, model_validator

from regauge.errors import SettingsError
from regauge.trackers import RunInfo, Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Scalars as TensorBoard event files."""

    peer_names: ClassVar[tuple[str, ...]] = ("tb",)

    flush_seconds: int = Field(default=30, ge=1)
    """Longest time that a value is buffered in memory."""

    _writer: SummaryWriter | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _is_installed(self) -> Self:
        if importlib.util.find_spec("tensorboard") is None:
            raise SettingsError(
                "the tracker 'tensorboard' needs the package tensorboard",
                'pip install "regauge[tensorboard]", or remove the tracker',
            )
        return self

    def start(self, run: RunInfo) -> None:
        """Open an event file; after a resume, purge the steps that will be repeated."""
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(
            str(run.folder / FOLDER),
            purge_step=_find_purge_step(run),
            flush_secs=self.flush_seconds,
        )
        if run.attempt == 1:
            self._add_json("settings", run.settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write each value as a scalar."""
        if self._writer:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def finish(self, summary: Mapping[str, object]) -> None:
        """Write the result as a text, next to the settings."""
        self._add_json("summary", summary)

    def close(self) -> None:
        """Flush the buffered values and end the writer's thread."""
        if self._writer:
            self._writer.close()
        self._writer = None

    def _add_json(self, name: str, values: Mapping[str, object]) -> None:
        if self._writer:
            text = json.dumps(values, indent=2, default=str)
            self._writer.add_text(name, f"```json\n{text}\n```")


def _find_purge_step(run: RunInfo) -> int | None:
    """Return the step from which earlier events are purged; None in the first attempt.

    All events are purged, from step 0, if the earlier attempt saved no checkpoint.
    """
    if run.attempt == 1:
        return None
    return run.resumed_step + 1 if run.resumed_step else 0
