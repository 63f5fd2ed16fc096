"""CPU energy counters, if the kernel lets this process read them.

Linux powercap has one counter per CPU package (Documentation/power/powercap in the kernel source).
It counts microjoules for the whole machine and wraps around at a maximum. Since 2020, most kernels
let only root read it.
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
    """Counter of one CPU package."""

    file: Path
    max_microjoules: int
    """Value at which the counter wraps around."""

    def read(self) -> int:
        """Return the microjoules since an unspecified start."""
        return int(self.file.read_text(encoding="utf-8"))


def find_counters(root: Path = ROOT) -> tuple[EnergyCounter, ...]:
    """Return the counters of all packages; empty if any cannot be read."""
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
    """Return a function that returns the joules since this call; None without counters.

    Handles one wrap-around per counter.
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
