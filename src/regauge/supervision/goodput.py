"""What share of a run's time was of use: from the first start of its processes to their last end.

Everything that is not a step or a measurement is loss, be it starting, waiting or work that was
done again. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge import jsonl
from regauge.supervision.cost_meter import ATTEMPTS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PRODUCTIVE = ("step", "evaluate")
"""Accounts of the ledger that are of use."""
IDLE = "idle"


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went, over all attempts."""

    seconds: Mapping[str, float]
    """By account of the ledger, and what no process has booked as `idle`."""
    ends: Mapping[int, str]
    """How each attempt ended, by its number: `finished`, or a kind of failure."""

    @property
    def total_seconds(self) -> float:
        """From the first start to the last end."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Productive seconds over all seconds."""
        useful = sum(self.seconds.get(name, 0.0) for name in PRODUCTIVE)
        return useful / self.total_seconds if self.total_seconds else 0.0


def goodput(folder: Path) -> Goodput | None:
    """Return where the time of an output folder's run went; None where no supervisor wrote it."""
    told = jsonl.whole(folder / ATTEMPTS)
    ledger = jsonl.last(folder / "ledger.jsonl")
    ended = [line["ended"] for line in told if "ended" in line]
    if not ended or ledger is None:
        return None
    began = min(line["began"] for line in told if "began" in line)
    booked: dict[str, Any] = ledger["seconds"]
    idle = max(0.0, max(ended) - began - sum(booked.values()))
    ends = {line["attempt"]: str(line["end"]) for line in told if "end" in line}
    return Goodput({**booked, IDLE: idle}, ends)
