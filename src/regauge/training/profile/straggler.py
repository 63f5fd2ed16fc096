"""Straggler detection: which rank makes the others wait."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from regauge.system.hooks import Hook
from regauge.system.log import logger
from regauge.training.gradients import all_reduce_sum

if TYPE_CHECKING:
    from regauge.system.processes import World

LATE_SHARE = 0.2
"""A straggler is later than the others' median by this fraction of a step."""
MIN_SECONDS = 0.02
"""Delays below this are the extra work of rank 0."""
CONSECUTIVE_LINES = 2
"""A rank is reported after being late in this many consecutive ledger lines."""


class StragglerDetector(Hook):
    """Measures each step's seconds before this process first waits for the others."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._world = world
        self._device = device
        self._step_began: float | None = None
        self._own_seconds = 0.0
        self._steps = 0
        self._interval_began = time.perf_counter()
        self._suspect: int | None = None
        self._suspect_lines = 0

    def before_batches(self, step: int) -> None:  # noqa: ARG002 - the event has it
        self._step_began = time.perf_counter()

    def before_collective(self) -> None:
        """Stop the step's clock; only the first collective in a step counts."""
        if self._step_began is not None:
            self._own_seconds += time.perf_counter() - self._step_began
            self._steps += 1
            self._step_began = None

    def ledger_fields(self) -> dict[str, Any]:
        """Return the straggler since the last call; every process calls this.

        `{"straggler": {"rank": 1, "delay_seconds": 0.5}}`: the rank, and its delay per step.
        `{"straggler": None}` if no rank is late.
        """
        return {"straggler": self._find_straggler()}

    def _find_straggler(self) -> dict[str, float] | None:
        now, steps = time.perf_counter(), max(self._steps, 1)
        step_seconds = (now - self._interval_began) / steps
        own_seconds = self._own_seconds / steps
        self._interval_began, self._own_seconds, self._steps = now, 0.0, 0
        by_rank = torch.zeros(self._world.size)
        by_rank[self._world.rank] = own_seconds
        seconds = all_reduce_sum(by_rank.to(self._device)).tolist()
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        others = statistics.median(seconds[:slowest] + seconds[slowest + 1 :])
        delay = seconds[slowest] - others
        if delay <= max(LATE_SHARE * step_seconds, MIN_SECONDS):
            self._suspect = None
            return None
        self._suspect_lines = self._suspect_lines + 1 if slowest == self._suspect else 1
        self._suspect = slowest
        if self._suspect_lines < CONSECUTIVE_LINES:
            return None
        if self._suspect_lines == CONSECUTIVE_LINES and self._world.is_main_process:
            logger.warning(
                "rank %d is a straggler: %.2f s per step before it first waits, the others %.2f s",
                slowest,
                seconds[slowest],
                others,
            )
        return {"rank": slowest, "delay_seconds": round(delay, 6)}
