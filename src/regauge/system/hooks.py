"""Training hooks, such as the ledger, profiler, straggler detector and fault injector.

The training loop calls events and does not know the hooks. A hook overrides the events it needs. An
event without an override costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

Inject = Callable[[str], Sequence[str]]
"""Called at a named point in a health check; returns the faults the check must simulate."""


def inject_nothing(_point: str) -> Sequence[str]:
    """Return no faults; the `Inject` function for a check without a fault plan."""
    return ()


class Hook:
    """Training events; a subclass overrides those it needs.

    `step` is the number of finished optimizer updates. Events without an override are never called.
    """

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context around a phase: `compile`, `data_wait`, `step`, `evaluate`, ..."""
        raise NotImplementedError

    def compilation(self) -> AbstractContextManager[None]:
        """Return a context around device work that may compile graphs."""
        raise NotImplementedError

    def before_batches(self, step: int) -> None:
        """Run before a step's batches are requested."""

    def row_offset(self, step: int) -> int:
        """Return the number of rows by which a step's global batch is shifted in the row order."""
        raise NotImplementedError

    def around_step(self, step: int, batches: list[dict[str, Any]]) -> AbstractContextManager[None]:
        """Return a context around a step; `batches` are this process's tensors."""
        raise NotImplementedError

    def gradient_factor(self, step: int) -> float:
        """Return a factor for this rank's gradients."""
        raise NotImplementedError

    def before_collective(self) -> None:
        """Run before a collective in which this rank may wait for other ranks."""

    def after_step(self, step: int) -> None:
        """Run after a step; `step` includes it."""

    def before_evaluation(self, step: int) -> None:
        """Run before the held-out rows are evaluated."""

    def after_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Run after the held-out rows are evaluated, with the metrics by name."""

    def during_save(self, point: str, step: int) -> None:
        """Run at a point in the checkpoint commit, such as `staged` or `rename`."""

    def after_save(self, step: int, checkpoint: Path) -> None:
        """Run in the training thread after a step's checkpoint is committed."""

    def ledger_fields(self) -> dict[str, Any]:
        """Return fields for the next ledger line; every rank calls this."""
        raise NotImplementedError

    def close(self) -> None:
        """Run after the last step, also after an error."""


EVENTS = {name for name in vars(Hook) if not name.startswith("_")}
CONTEXTS = {"phase", "compilation", "around_step"}
"""Events that return a context."""


class Hooks(Hook):
    """The hooks of a run as one, called in the order in which they were added."""

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self._callbacks: dict[str, list[Callable[..., Any]]] = {name: [] for name in EVENTS}
        for name in EVENTS - vars(Hooks).keys():
            call = self._around if name in CONTEXTS else self._call
            setattr(self, name, partial(call, self._callbacks[name]))
        for hook in hooks:
            self.add(hook)

    def add(self, hook: Hook) -> None:
        """Register the events overridden by a hook."""
        for name in EVENTS:
            if getattr(type(hook), name) is not getattr(Hook, name):
                self._callbacks[name].append(getattr(hook, name))

    def row_offset(self, step: int) -> int:
        """Return the sum of all row offsets."""
        return sum(callback(step) for callback in self._callbacks["row_offset"])

    def gradient_factor(self, step: int) -> float:
        """Return the product of all gradient factors."""
        factors = (callback(step) for callback in self._callbacks["gradient_factor"])
        return float(math.prod(factors))

    def ledger_fields(self) -> dict[str, Any]:
        """Return all hooks' ledger fields."""
        fields: dict[str, Any] = {}
        for callback in self._callbacks["ledger_fields"]:
            fields |= callback()
        return fields

    @staticmethod
    def _call(callbacks: list[Callable[..., Any]], *values: Any, **named: Any) -> None:
        for callback in callbacks:
            callback(*values, **named)

    @staticmethod
    def _around(
        callbacks: list[Callable[..., Any]], *values: Any, **named: Any
    ) -> AbstractContextManager[None]:
        contexts = [partial(callback, *values, **named) for callback in callbacks]
        return _enter_contexts(contexts) if contexts else nullcontext()


@contextmanager
def _enter_contexts(contexts: Iterable[Callable[[], Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield
