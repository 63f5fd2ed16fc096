"""Goodput: the productive share of a run's time, from the first start to the last end.

Time outside steps and evaluations is lost, such as starts, waits and repeated steps. This module
does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.config.output_files import ATTEMPTS, LEDGER
from regauge.run_folders.documents import AttemptLine, LedgerLine
from regauge.system import jsonl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PRODUCTIVE = ("step", "evaluate")
IDLE = "idle"


@dataclass(frozen=True)
class Goodput:
    """A run's time by account, over all attempts."""

    seconds: Mapping[str, float]
    """Ledger account -> seconds; `idle` is time not booked by any process."""
    outcomes: Mapping[int, str]
    """Attempt number -> how it ended: `finished`, or a failure kind."""

    @property
    def total_seconds(self) -> float:
        """Seconds from the first start to the last end."""
        return sum(self.seconds.values())

    @property
    def fraction(self) -> float:
        """Productive seconds over all seconds."""
        productive = sum(self.seconds.get(name, 0.0) for name in PRODUCTIVE)
        return productive / self.total_seconds if self.total_seconds else 0.0


def read_goodput(folder: Path) -> Goodput | None:
    """Return the goodput for an output folder's run; None if no supervisor wrote it."""
    lines = jsonl.read_lines(folder / ATTEMPTS, AttemptLine)
    ledger = jsonl.read_last_line(folder / LEDGER, LedgerLine)
    return None if ledger is None else compute_goodput(lines, ledger)


def compute_goodput(
    lines: Sequence[dict[str, Any]], ledger: Mapping[str, Any], until: float | None = None
) -> Goodput | None:
    """Return the goodput from `attempts.jsonl` lines and the ledger's last line.

    `until` is the time up to which a run without a recorded end is counted, in seconds since the
    epoch. Returns None if a start or an end is unknown.
    """
    end_times = [line["ended_at"] for line in lines if line.get("ended_at") is not None]
    start_times = [line["started_at"] for line in lines if line.get("started_at") is not None]
    if until is not None:
        end_times.append(until)
    if not (start_times and end_times):
        return None
    began = min(start_times)
    booked: dict[str, Any] = ledger.get("seconds", {})
    idle = max(0.0, max(end_times) - began - sum(booked.values()))
    outcomes = {line["attempt"]: str(line["outcome"]) for line in lines if line.get("outcome")}
    return Goodput({**booked, IDLE: idle}, outcomes)
