"""A run's cost so far: how long it held machines, times their price.

A run pays from the moment its command locks the output folder until the last process has ended,
including starts and lost work. The cost is written at the start and end of each attempt
(`attempts.jsonl`), and continues from there on any number of machines. This module does not import
torch.

The file `.seen` has the time when a run was last alive. It bounds the cost of an attempt killed
before its end was written. The supervisor writes it once a second. The first process writes it with
each checkpoint, so that checkpoints never contain a cost that the next command does not know.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from regauge.config.output_files import ATTEMPTS, LAST_SEEN, LEDGER
from regauge.run_folders.documents import LedgerLine, PaidLine
from regauge.system import jsonl
from regauge.system.errors import DataError
from regauge.system.files import open_in_place, read_content
from regauge.system.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from pathlib import Path


_EPOCH = time.time() - time.monotonic()
"""The start of time.monotonic(), in seconds since the epoch."""


def read_time() -> float:
    """Return the time in seconds since the epoch, from a clock that is never set.

    Differences between two readings in a process are the seconds that passed.
    """
    return _EPOCH + time.monotonic()


@dataclass(frozen=True)
class Cost:
    machine_seconds: float = 0.0
    device_seconds: float = 0.0
    usd: float | None = None
    """None if any part's price is unknown."""

    @property
    def document(self) -> dict[str, Any]:
        usd = None if self.usd is None else round(self.usd, 6)
        return {
            "machine_seconds": round(self.machine_seconds, 3),
            "device_seconds": round(self.device_seconds, 3),
            "usd": usd,
        }


def parse_cost(document: dict[str, Any]) -> Cost:
    """Parse a cost in a JSON document; missing fields are 0 or unknown."""
    known = ("machine_seconds", "device_seconds", "usd")
    return Cost(**{name: document[name] for name in known if name in document})


@dataclass(frozen=True)
class CostMeter:
    """The cost of a run that holds a fixed number of machines since a moment."""

    paid_before: Cost
    """Cost up to that moment."""
    start_clock: float
    """Start time on time.monotonic(), in seconds."""
    machines: int
    devices: int
    """Processes on all machines: one per device."""
    usd_per_hour: float | None
    """USD per hour for one machine; None if unknown."""

    def read(self) -> Cost:
        return self.cost_after(time.monotonic() - self.start_clock)

    def cost_after(self, seconds: float) -> Cost:
        """Return the cost after this many seconds."""
        before, seconds = self.paid_before, max(0.0, seconds)
        machine_seconds = before.machine_seconds + seconds * self.machines
        if self.usd_per_hour is None:
            usd = None
        elif before.usd is None:
            usd = machine_seconds / SECONDS_PER_HOUR * self.usd_per_hour
        else:
            usd = before.usd + seconds * self.machines / SECONDS_PER_HOUR * self.usd_per_hour
        devices = before.device_seconds + seconds * self.devices
        return Cost(machine_seconds, devices, usd)

    def resume_from(self, other: Cost) -> CostMeter:
        """Return a meter that continues from another cost, if that one is higher."""
        if other.machine_seconds <= self.paid_before.machine_seconds:
            return self
        return replace(self, paid_before=other)

    @property
    def start_fields(self) -> dict[str, Any]:
        """JSON fields for an attempt's start; they price an attempt whose end is never written."""
        counts = {"processes": self.devices, "nodes": self.machines}
        return {**counts, "usd_per_hour": self.usd_per_hour, **self.paid_before.document}


def parse_meter(document: dict[str, Any]) -> CostMeter:
    """Parse a meter from JSON written with `asdict`."""
    return CostMeter(**{**document, "paid_before": Cost(**document["paid_before"])})


def read_last_seen(folder: Path) -> float | None:
    """Return the time at which a run was last alive, in seconds since the epoch, or None."""
    try:
        seconds = float(read_content(folder / LAST_SEEN, "remove it") or b"")
    except (DataError, ValueError):
        return None
    return seconds if math.isfinite(seconds) else None


def write_last_seen(folder: Path) -> None:
    """Write that a run is alive now; does nothing before its first attempt is recorded."""
    if not (folder / ATTEMPTS).exists():
        return
    file = open_in_place(folder / LAST_SEEN, os.O_WRONLY | os.O_CREAT)
    try:
        os.write(file, f"{read_time():.3f}".encode())  # always of one length: no part is left over
    finally:
        os.close(file)


def read_paid(folder: Path, started_at: float, last_seen_at: float | None) -> tuple[Cost, float]:
    """Return a run's cost at the end of the last attempt, and since when it pays again.

    `started_at` is this command's start, `last_seen_at` when the previous one was last alive. All
    times are in seconds since the epoch. An attempt without a recorded end ended when it was last
    alive.
    """
    last = jsonl.read_last_line(folder / ATTEMPTS, PaidLine)
    if last is None or last.get("started_at") is None:
        return Cost(), started_at
    began = last["started_at"]
    if last.get("ended_at") is not None:
        return parse_cost(last), max(started_at, float(last["ended_at"]))
    until = began if last_seen_at is None else last_seen_at
    return extend_cost(last, until), max(started_at, float(began))


def read_ledger_cost(folder: Path) -> Cost:
    """Return a run's cost up to the last ledger line, without a later attempt."""
    return parse_cost(jsonl.read_last_line(folder / LEDGER, LedgerLine) or {})


def extend_cost(line: dict[str, Any], until: float) -> Cost:
    """Return the cost up to a time, given the line of an attempt whose end was not written.

    `until` is in seconds since the epoch.
    """
    meter = CostMeter(
        parse_cost(line),
        0.0,
        int(line.get("nodes", 1)),
        int(line.get("processes", 1)),
        line.get("usd_per_hour"),
    )
    return meter.cost_after(until - line["started_at"])
