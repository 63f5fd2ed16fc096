"""The work that is due by each deadline, and how long it may still wait."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

SLOT_SECONDS = 0.1
"""Deadline slot width."""
MAX_SLOT = 1 << 53
"""Slot for records without a deadline."""


class DeadlineSlack(NamedTuple):
    """How long records may still wait."""

    seconds: float
    deadline: float
    """Records due before this must be computed first to be on time."""


@dataclass
class DeadlineDemand:
    """Deadline -> waiting milliseconds, to see whether all records can be on time.

    Deadlines are rounded down to slots, to keep their number small.
    """

    _slots: list[int] = field(default_factory=list)
    """Slots with waiting records, in ascending order."""
    _milliseconds: dict[int, float] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)

    def add(self, deadline: float, milliseconds: float) -> None:
        slot = _find_slot(deadline)
        if slot not in self._counts:
            insort(self._slots, slot)
        self._counts[slot] = self._counts.get(slot, 0) + 1
        self._milliseconds[slot] = self._milliseconds.get(slot, 0.0) + milliseconds

    def remove(self, deadline: float, milliseconds: float) -> None:
        slot = _find_slot(deadline)
        self._counts[slot] -= 1
        self._milliseconds[slot] -= milliseconds
        if not self._counts[slot]:
            del self._slots[bisect_left(self._slots, slot)]
            del self._counts[slot], self._milliseconds[slot]

    def find_slack(
        self, now: float, busy_seconds: float, pace: float, since: float = 0.0
    ) -> DeadlineSlack:
        """Return the seconds all records may still wait, earliest deadline first.

        Negative if a record will be late, and infinite without records. `busy_seconds` is the time
        until the workers are free, and `pace` the workers' seconds per millisecond. Records with a
        deadline before `since` take time, but may be late.
        """
        first, total = _find_slot(since), busy_seconds
        slack, tightest = math.inf, MAX_SLOT
        for slot in self._slots:
            total += self._milliseconds[slot] * pace
            if slot >= first and slot * SLOT_SECONDS - now - total < slack:
                slack, tightest = slot * SLOT_SECONDS - now - total, slot
        return DeadlineSlack(slack, (tightest + 1) * SLOT_SECONDS)


def _find_slot(deadline: float) -> int:
    return int(min(deadline / SLOT_SECONDS, MAX_SLOT))
