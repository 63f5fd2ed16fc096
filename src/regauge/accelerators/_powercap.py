"""The energy counters of processors, if the kernel allows the process to read them.

Linux powercap has one counter for each processor package (Documentation/power/powercap in the
kernel's source). It counts microjoules and restarts at zero after a largest value. The counters
include all work of the machine. Since 2020, most kernels let only root read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path("/sys/class/powercap")


@dataclass(frozen=True)
class EnergyCounter:
    """The counter of one processor package."""

    file: Path
    max_microjoules: int
    """The largest value, after which the counter restarts at zero."""

    def read(self) -> int:
        """Return the microjoules since an unspecified moment."""
        return int(self.file.read_text(encoding="utf-8"))


def find_counters(root: Path = ROOT) -> tuple[EnergyCounter, ...]:
    """Return the counters of all packages, or none if one of them cannot be read."""
    counters = []
    for zone in sorted(root.glob("*")):
        try:
            if not (zone / "name").read_text(encoding="utf-8").startswith("package"):
                continue
            max_microjoules = int((zone / "max_energy_range_uj").read_text(encoding="utf-8"))
            counter = EnergyCounter(zone / "energy_uj", max_microjoules)
            counter.read()
        except (OSError, ValueError):
            if (zone / "energy_uj").exists():
                return ()
            continue
        counters.append(counter)
    return tuple(counters)


def start_meter(root: Path = ROOT) -> Callable[[], float] | None:
    """Return a function that returns the joules since this call; None if there is no counter.

    Each counter may restart at zero once.
    """
    starts = [(counter, counter.read()) for counter in find_counters(root)]
    if not starts:
        return None

    def joules() -> float:
        differences = (
            (counter.read() - start) % (counter.max_microjoules + 1) for counter, start in starts
        )
        return sum(differences) / 1e6

    return joules
