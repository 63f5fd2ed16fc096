"""An attempt among its nodes, and where there is one only: this machine."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge import jsonl
from regauge.processes import Seats, free_port
from regauge.supervision.cost_meter import ATTEMPTS
from regauge.supervision.folder_lock import Owner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from regauge.supervision.failures import Failure
    from regauge.supervision.signals import Signals


@dataclass(frozen=True)
class Shared:
    """What all nodes of an attempt must know alike."""

    attempt: int
    token: str
    """The attempt's right to publish checkpoints."""
    preflight: bool
    """Whether the processes check their devices and what they tell each other first."""
    seats: Seats
    """Where the processes of this node stand."""


class Alone:
    """The nodes of an attempt, as the supervisor of this one knows them: there is no other."""

    nodes = 1

    def __init__(self, shared: Shared, *, leads: bool = True) -> None:
        self.shared = shared
        self.leads = leads
        """Whether this node writes down what became of the attempt."""

    def listen(self, signs: Callable[[], int]) -> None:
        """Tell the others how many signs the processes of this node gave, from now on."""

    def alarm(self) -> str | None:
        """Return how another node's processes ended the attempt: `failed`, `hang`, or None."""
        return None

    def leaving(self) -> bool:
        """Return whether all shall save and begin again, with another number of nodes."""
        return False

    def quiet_seconds(self) -> float:
        """Return for how long the other nodes' processes gave no sign."""
        return math.inf

    def settle(self, failure: Failure | None, *, told: bool) -> Failure | None:
        """Return what ended the attempt, from what did so here; `told` to stop or not."""
        del told
        return failure


class ThisMachine:
    """Holds the attempts of a run that has one node; the output folder is its own meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owner = Owner(folder)
        self._last = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Own the output folder for as long as the block lasts."""
        with self._owner:
            yield

    @contextmanager
    def attempt(self, size: int, signals: Signals, *, preflight: bool) -> Iterator[Alone]:
        """Begin an attempt of `size` processes."""
        del signals
        seats = Seats(size=size, port=free_port())
        self._last = max(self._last, attempts(self._folder)) + 1
        yield Alone(Shared(self._last, self._owner.admit(), preflight, seats))

    def over(self, code: int, line: str) -> None:
        """Take note of how the run ended."""


def attempts(folder: Path) -> int:
    """Return the number of a run's last attempt, with a supervisor or without; 0 without any."""
    told = (jsonl.last(folder / name) for name in (ATTEMPTS, "ledger.jsonl"))
    return max((int(line["attempt"]) for line in told if line), default=0)
