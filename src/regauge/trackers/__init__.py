"""Where a run's metrics go while it runs: one file per kind of place.

Rank 0 alone has trackers. A tracker's settings are frozen; what it holds open between `start` and
`close` is a private attribute. Names of values: `train/…` for a line of training, and the name of
a split, such as `heldout/recall@10`, for an evaluation. Of one of several tasks they are
`train.words/loss` and `heldout.words/loss`.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from regauge.config import Choice

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


def of_training(name: str) -> bool:
    """Return whether a value is of a line of training."""
    return name.startswith(("train/", "train."))


@dataclass(frozen=True)
class RunFacts:
    """What a tracker may know of the run that it follows."""

    name: str
    run_id: str
    """The same for every attempt of a run."""
    folder: Path
    attempt: int = 1
    """Counts from 1."""
    total_steps: int | None = None
    """None where the run has no length that is known before it ends."""
    resumed_step: int = 0
    """The last step that earlier attempts finished and saved."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The resolved settings, JSON-ready."""


class Tracker(Choice):
    """A place that metrics go to.

    Calls come in the order `start`, `log`…, `finish`, `close`. A run that fails is closed without
    `finish`, and the next attempt starts on the same folder with a higher `attempt`.
    """

    def start(self, run: RunFacts) -> None:
        """Open what is written to; a later attempt goes on where the earlier ones ended."""
        raise NotImplementedError

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of one step: a line of training, or of an evaluation."""
        raise NotImplementedError

    def finish(self, summary: Mapping[str, object]) -> None:
        """Take the result of a run that reached its end."""

    def close(self) -> None:
        """Let go of files and threads; harmless when nothing is open."""


class Together:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand the values to every tracker."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def finish(self, summary: Mapping[str, object]) -> None:
        """Hand the result to every tracker."""
        for tracker in self._trackers:
            tracker.finish(summary)


@contextmanager
def started(trackers: Sequence[Tracker], run: RunFacts) -> Iterator[Together]:
    """Start the trackers, and close each of them however the block ends.

    One that cannot start closes those before it.
    """
    with ExitStack() as stack:
        for tracker in trackers:
            stack.callback(tracker.close)
            tracker.start(run)
        yield Together(trackers)
