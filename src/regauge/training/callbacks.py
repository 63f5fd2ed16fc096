"""Callbacks: custom code that a training run calls after steps, evaluations and saves.

A callback is an object of the program that calls `regauge.train`, or the import path of a class or
function in the setting `callbacks`. The training loop sees callbacks as one hook.
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
    """The state of a run when a callback is called.

    For example:

        >>> event.step, event.metrics["heldout/loss"]
        (100, 2.5)
    """

    step: int
    """Number of finished optimizer updates."""
    total_steps: int
    """Length of the run in steps."""
    folder: Path
    """Output folder of the run."""
    rank: int
    """Rank of this process; 0 is the main process."""
    model: nn.Module
    """The module in training. With a sharded strategy it has the weights of this process only."""
    metrics: dict[str, float] = field(default_factory=dict)
    """In `on_evaluate`: the held-out metrics by name, such as `heldout/loss`."""
    checkpoint: Path | None = None
    """In `on_save`: the folder of the checkpoint."""


class Callback:
    """Custom code that a training run calls; override the methods that you need.

    Every process of the run calls them, in the training thread. An exception ends the run.

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
    """Calls the callbacks of a run."""

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
        self._facts: dict[str, Any] = {
            "model": model,
            "folder": folder,
            "rank": rank,
            "total_steps": steps,
        }

    def after_step(self, step: int) -> None:
        """Call `on_step`."""
        event = TrainingEvent(step, **self._facts)
        for callback in self._callbacks:
            callback.on_step(event)

    def after_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Call `on_evaluate`."""
        event = TrainingEvent(step, metrics=dict(metrics), **self._facts)
        for callback in self._callbacks:
            callback.on_evaluate(event)

    def after_save(self, step: int, checkpoint: Path) -> None:
        """Call `on_save`."""
        event = TrainingEvent(step, checkpoint=checkpoint, **self._facts)
        for callback in self._callbacks:
            callback.on_save(event)


def load_callbacks(paths: Sequence[str]) -> list[Callback]:
    """Return the callbacks of import paths `module:Class`.

    Raises SettingsError if a path names no callback.
    """
    callbacks = [choices.load_function(path)() for path in paths]
    check_callbacks(callbacks)
    return callbacks


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Raise SettingsError for an object that is no callback."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            is_class = isinstance(callback, type) and issubclass(callback, Callback)
            remedy = f"create it: {name}()" if is_class else REMEDY
            raise SettingsError(f"callbacks: {name} is no callback", remedy)
