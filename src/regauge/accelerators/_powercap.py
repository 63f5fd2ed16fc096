"""Joules that a processor says it has taken, where the kernel lets them be read.

The counters are those of powercap (Documentation/power/powercap in the kernel's tree): microjoules
of each package since some moment, which begin again at zero beyond a largest value. They count all
that a machine does, and since 2020 mostly answer to root alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path("/sys/class/powercap")


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


def meter(root: Path = ROOT) -> Callable[[], float] | None:
    """Return what counts joules from now on; each counter may begin again once."""
    before = [(counter, counter.read()) for counter in counters(root)]
    if not before:
        return None
    return lambda: sum((each.read() - then) % (each.most + 1) for each, then in before) / 1e6
