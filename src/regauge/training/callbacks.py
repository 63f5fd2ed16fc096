"""Callbacks: custom code called after steps, evaluations and saves.

A callback is an object passed to `regauge.train`, or the import path of a class or function in the
setting `callbacks`. The training loop sees callbacks as one hook.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.system import choices
from regauge.system.errors import SettingsError
from regauge.system.hooks import Hook

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

REMEDY = "inherit from regauge.Callback"


@dataclass(frozen=True)
class TrainingEvent:
    """Run state passed to a callback.

    For example:

        >>> event.step, event.metrics["heldout/loss"]
        (100, 2.5)
    """

    step: int
    """Finished optimizer updates."""
    total_steps: int
    """Run length in steps."""
    folder: Path
    """Run folder."""
    rank: int
    """This process's rank; 0 is the main process."""
    model: nn.Module
    """The module being trained. With a sharded strategy it holds only this process's weights."""
    metrics: dict[str, float] = field(default_factory=dict)
    """In `on_evaluate`: held-out metrics by name, such as `heldout/loss`."""
    checkpoint: Path | None = None
    """In `on_save`: the checkpoint folder."""


class Callback:
    """Custom code called during training; override the methods you need.

    Every process calls them, in the training thread. An exception ends the run.

    For example:

        >>> class Progress(regauge.Callback):
        ...     def on_step(self, event):
        ...         print(event.step, "of", event.total_steps)
    """

    def on_step(self, event: TrainingEvent) -> None:
        """Run after an optimizer update."""

    def on_evaluate(self, event: TrainingEvent) -> None:
        """Run after an evaluation on held-out rows, also before the first step."""

    def on_save(self, event: TrainingEvent) -> None:
        """Run after a checkpoint is committed; training may have continued since its step."""


class CallbackHook(Hook):
    """Calls callbacks as a hook of the training loop."""

    def __init__(
        self,
        callbacks: Sequence[Callback],
        model: nn.Module,
        folder: Path,
        *,
        rank: int,
        steps: int,
    ) -> None:
        self._callbacks = callbacks
        self._run: dict[str, Any] = {
            "model": model,
            "folder": folder,
            "rank": rank,
            "total_steps": steps,
        }

    def after_step(self, step: int) -> None:
        self._call("on_step", step)

    def after_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._call("on_evaluate", step, metrics=dict(metrics))

    def after_save(self, step: int, checkpoint: Path) -> None:
        self._call("on_save", step, checkpoint=checkpoint)

    def _call(self, method: str, step: int, **fields: Any) -> None:
        event = TrainingEvent(step, **self._run, **fields)
        for callback in self._callbacks:
            getattr(callback, method)(event)


def load_callbacks(paths: Sequence[str]) -> list[Callback]:
    """Import callbacks from paths such as `module:Class`.

    Raises SettingsError if a path does not name a callback.
    """
    callbacks = [choices.load_function(path)() for path in paths]
    check_callbacks(callbacks)
    return callbacks


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Raise SettingsError for an object that is not a callback."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            is_class = isinstance(callback, type) and issubclass(callback, Callback)
            remedy = f"create it: {name}()" if is_class else REMEDY
            raise SettingsError(f"callbacks: {name} is not a callback", remedy)
