"""Which process holds the others up.

In a step all processes wait for each other, so that each of them takes as long as the slowest. What
differs is the time before a process first waits: its data and its own work up to there.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

from regauge.log import logger
from regauge.training.step import summed

if TYPE_CHECKING:
    from regauge.processes import World

LATE_SHARE = 0.2
"""Of a step's seconds: who is later than the others by more holds them up."""
LEAST_SECONDS = 0.02
"""Less than that is what the first process does for all."""
LINES = 2
"""Lines of metrics in a row in which it must."""


class Pace:
    """The seconds of each step before this process waits for others; all processes call `look`."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._world = world
        self._device = device
        self._began: float | None = None
        self._own = 0.0
        self._steps = 0
        self._since = time.perf_counter()
        self._suspect: int | None = None
        self._lines = 0

    def begin(self) -> None:
        """Begin a step, before its batches are there."""
        self._began = time.perf_counter()

    def arrive(self) -> None:
        """Note that this process comes to what it may wait in; only the first time in a step."""
        if self._began is not None:
            self._own += time.perf_counter() - self._began
            self._steps += 1
            self._began = None

    def look(self) -> dict[str, float] | None:
        """Return the process that holds the others up since the last look; None for none.

        `{"rank": 1, "seconds": 0.5}`: by how much it comes later in each step.
        """
        now, steps = time.perf_counter(), max(self._steps, 1)
        took, own = (now - self._since) / steps, self._own / steps
        self._since, self._own, self._steps = now, 0.0, 0
        if self._world.size == 1:
            return None
        everyone = torch.zeros(self._world.size)
        everyone[self._world.rank] = own
        seconds = summed(everyone.to(self._device)).tolist()
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        others = statistics.median(seconds[:slowest] + seconds[slowest + 1 :])
        late = seconds[slowest] - others
        if late <= max(LATE_SHARE * took, LEAST_SECONDS):
            self._suspect = None
            return None
        self._lines = self._lines + 1 if slowest == self._suspect else 1
        self._suspect = slowest
        if self._lines < LINES:
            return None
        if self._lines == LINES and self._world.first:
            logger.warning(
                "process %d holds the others up: %.2f s a step before it first waits, they %.2f s",
                slowest,
                seconds[slowest],
                others,
            )
        return {"rank": slowest, "seconds": round(late, 6)}
