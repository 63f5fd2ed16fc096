"""What a run has cost so far: the time for which it held machines, and their price.

A run pays from the moment its command has the output folder until its last process has ended, be
it for steps, starts or work that is lost. Readings are written at the beginning and the end of each
attempt (`attempts.jsonl`), and go on from there under any number of machines. No torch here.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from regauge import jsonl
from regauge.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from pathlib import Path

ATTEMPTS = "attempts.jsonl"
SEEN = ".seen"
"""When a run was last there, in seconds since the epoch: a kill leaves no end behind.

A supervisor writes it each second, and the first process with each checkpoint: no checkpoint knows
of dollars that the next command does not.
"""


@dataclass(frozen=True)
class Reading:
    """What was paid for up to a moment."""

    machine_seconds: float = 0.0
    device_seconds: float = 0.0
    usd: float | None = None
    """None where the price of any of it is unknown."""

    @property
    def document(self) -> dict[str, Any]:
        """What is written of it."""
        usd = None if self.usd is None else round(self.usd, 6)
        return {
            "machine_seconds": round(self.machine_seconds, 3),
            "device_seconds": round(self.device_seconds, 3),
            "usd": usd,
        }


def reading(document: dict[str, Any]) -> Reading:
    """Return the reading that a document tells of; what it does not say is nothing paid."""
    known = ("machine_seconds", "device_seconds", "usd")
    return Reading(**{name: document[name] for name in known if name in document})


@dataclass(frozen=True)
class Meter:
    """Counts on from a reading."""

    before: Reading
    clock: float
    """This machine's monotonic clock at that reading."""
    machines: int
    devices: int
    """Processes on all machines: one for each device."""
    usd_per_hour: float | None
    """Price of one machine; None where it is unknown."""

    def read(self) -> Reading:
        """Return what was paid for up to now."""
        return self.after(time.monotonic() - self.clock)

    def after(self, seconds: float) -> Reading:
        """Return what was paid for some seconds after the reading it began with."""
        before, seconds = self.before, max(0.0, seconds)
        machine_seconds = before.machine_seconds + seconds * self.machines
        if self.usd_per_hour is None:
            usd = None
        elif before.usd is None:
            usd = machine_seconds / SECONDS_PER_HOUR * self.usd_per_hour
        else:
            usd = before.usd + seconds * self.machines / SECONDS_PER_HOUR * self.usd_per_hour
        devices = before.device_seconds + seconds * self.devices
        return Reading(machine_seconds, devices, usd)

    def at_least(self, other: Reading) -> Meter:
        """Return a meter that goes on from another reading where that one is further."""
        if other.machine_seconds <= self.before.machine_seconds:
            return self
        return replace(self, before=other)

    @property
    def line(self) -> dict[str, Any]:
        """What is written where an attempt begins, so that one without an end can be paid for."""
        counted = {"processes": self.devices, "nodes": self.machines}
        return {**counted, "usd_per_hour": self.usd_per_hour, **self.before.document}


def metered(document: dict[str, Any]) -> Meter:
    """Return the meter that a document tells of, as `asdict` made it."""
    return Meter(**{**document, "before": Reading(**document["before"])})


def last_seen(folder: Path) -> float | None:
    """Return when a run last said that it was there, in seconds since the epoch."""
    try:
        return float((folder / SEEN).read_text())
    except (OSError, ValueError):
        return None


def say_seen(folder: Path) -> None:
    """Say that a run is there; nothing before it has begun to write."""
    if not (folder / ATTEMPTS).exists():
        return
    file = os.open(folder / SEEN, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.write(file, f"{time.time():.3f}".encode())  # as long as the one before: never in parts
    finally:
        os.close(file)


def paid(folder: Path, taken: float, seen: float | None) -> tuple[Reading, float]:
    """Return what a run had paid at the end of its last attempt, and when it pays again from.

    `taken` is when this command began, `seen` when the one before was last there, in seconds since
    the epoch: an attempt that nobody wrote the end of ended then.
    """
    last = jsonl.last(folder / ATTEMPTS)
    if last is None or "began" not in last:
        return Reading(), taken
    told = reading(last)
    if "ended" in last:
        return told, max(taken, float(last["ended"]))
    until = seen if seen is not None and last["began"] < taken else last["began"]
    then = Meter(
        told,
        0.0,
        int(last.get("nodes", 1)),
        int(last.get("processes", 1)),
        last.get("usd_per_hour"),
    )
    return then.after(until - last["began"]), max(taken, float(last["began"]))
