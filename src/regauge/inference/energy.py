"""Joules that a processor says it has taken, where the kernel lets them be read.

The counters are those of powercap (Documentation/power/powercap in the kernel's tree): microjoules
of each package since some moment, which begin again at zero beyond a largest value. They count all
that a machine does, and since 2020 mostly answer to root alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/class/powercap")
SOURCE = "measured: counters of all processor packages, whatever else the machine did"


@dataclass(frozen=True)
class Counter:
    """One package."""

    file: Path
    most: int
    """Microjoules after which it begins again."""

    def read(self) -> int:
        """Return microjoules since some moment."""
        return int(self.file.read_text())


def counters(root: Path = ROOT) -> tuple[Counter, ...]:
    """Return the counters of all packages; none where one of them cannot be read."""
    found = []
    for zone in sorted(root.glob("*")):
        try:
            if not (zone / "name").read_text().startswith("package"):
                continue
            most = int((zone / "max_energy_range_uj").read_text())
            counter = Counter(zone / "energy_uj", most)
            counter.read()
        except (OSError, ValueError):
            if (zone / "energy_uj").exists():
                return ()
            continue
        found.append(counter)
    return tuple(found)


class Meter:
    """Counts from when it is made."""

    def __init__(self, found: tuple[Counter, ...]) -> None:
        self._before = [(counter, counter.read()) for counter in found]

    def joules(self) -> float | None:
        """Return what was taken; None without counters. Each may have begun again once."""
        if not self._before:
            return None
        return sum((each.read() - before) % (each.most + 1) for each, before in self._before) / 1e6
