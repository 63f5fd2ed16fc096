"""Trackers: destinations for a run's metrics, one file per kind.

`start_trackers` is the entry point; only rank 0 calls it. A tracker's settings are frozen; open
files and connections are private attributes. Training metrics are named `train/loss`, evaluation
metrics by split, such as `heldout/recall@10`. A multi-task run adds the task name:
`train.words/loss`, `heldout.words/loss`. This package does not import other Regauge packages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from regauge.config import Choice

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


TRAIN_LOSS = "train/loss"
AVERAGED_STEPS = "train/averaged_steps"
"""How many steps a line's training loss is averaged over."""


def is_train_metric(name: str) -> bool:
    """Return whether a metric belongs to training rather than an evaluation."""
    return name.startswith(("train/", "train."))


def is_evaluation_metric(name: str) -> bool:
    """Return whether a key in a metrics line is an evaluation metric."""
    return "/" in name and not is_train_metric(name)


def ignore_wait() -> None:
    """Do nothing while a tracker waits."""


@dataclass(frozen=True)
class RunInfo:
    name: str
    run_id: str
    """The same for all attempts in a run."""
    folder: Path
    attempt: int = 1
    """Counts from 1."""
    total_steps: int | None = None
    """None if the run length is not known before the end."""
    resumed_step: int = 0
    """Checkpoint step from which this attempt resumes; 0 for a new run."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The resolved settings, JSON-ready."""
    on_wait: Callable[[], None] = ignore_wait
    """Called at least once a second while a tracker waits for its service at the end of a run."""


class Tracker(Choice):
    """A metrics destination.

    Calls come in the order `start`, `log`…, `finish`, `close`. After a failure `close` is called
    without `finish`; the next attempt starts in the same folder with a higher `attempt`.
    """

    def start(self, run: RunInfo) -> None:
        """Open the destination; a later attempt continues the earlier records."""
        raise NotImplementedError

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record one step's metrics, from training or evaluation."""
        raise NotImplementedError

    def finish(self, summary: Mapping[str, object]) -> None:
        """Record the result when a run reaches its end."""

    def close(self) -> None:
        """Release files and threads; does nothing if none are open."""


class TrackerGroup:
    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, values)

    def finish(self, summary: Mapping[str, object]) -> None:
        for tracker in self._trackers:
            tracker.finish(summary)


@contextmanager
def start_trackers(trackers: Sequence[Tracker], run: RunInfo) -> Iterator[TrackerGroup]:
    """Start the trackers and close them at the end of the block, also after an error.

    If a tracker cannot start, the trackers before it are closed.
    """
    with ExitStack() as stack:
        for tracker in trackers:
            stack.callback(tracker.close)
            tracker.start(run)
        yield TrackerGroup(trackers)
