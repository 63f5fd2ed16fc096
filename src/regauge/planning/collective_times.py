"""Seconds of a collective inside a machine, read from measured curves of similar systems.

A curve gives the seconds for each message size of one collective on one system and number of
devices. Between two sizes, the logarithms are interpolated. A system without curves gets those of
the measured system with the nearest link, scaled by the ratio of the bandwidths.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.files import read_csv_rows
from regauge.planning.network import Collective, ring_factor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ROWS = Path(__file__).with_name("collective_rows.csv")


@dataclass(frozen=True)
class CollectiveCurve:
    """Seconds of one collective by message size on one system."""

    system: str
    version: str
    """Version of the communication library."""
    collective: Collective
    devices: int
    sizes: Sequence[float]
    """Bytes, ascending."""
    seconds: Sequence[float]

    def read(self, size: float) -> float:
        """Return the seconds of a message; beyond the largest one, they grow with its size."""
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        if size <= self.sizes[0]:
            return self.seconds[0]
        upper = bisect.bisect_right(self.sizes, size)
        low, high = self.sizes[upper - 1], self.sizes[upper]
        share = math.log(size / low) / math.log(high / low)
        ratio = self.seconds[upper] / self.seconds[upper - 1]
        return float(self.seconds[upper - 1] * ratio**share)


@dataclass(frozen=True)
class CurveKey:
    """The collective whose seconds are requested."""

    system: str
    collective: Collective
    devices: int
    version: str = ""


def collective_seconds(
    key: CurveKey, size: float, curves: Iterable[CollectiveCurve], links: Mapping[str, float]
) -> float:
    """Return the seconds of a collective with `size` bytes.

    `links`: bytes per second of one device's link, for each system.
    """
    curve = find_curve(key, curves, links)
    seconds = curve.read(size)
    moved = ring_factor(key.collective, key.devices) / ring_factor(curve.collective, curve.devices)
    scale = moved * links[curve.system] / links[key.system]
    latency = min(curve.seconds[0], seconds)
    return latency + (seconds - latency) * scale


def find_curve(
    key: CurveKey, curves: Iterable[CollectiveCurve], links: Mapping[str, float]
) -> CollectiveCurve:
    """Return the nearest curve: by link, then by number of devices, then by library version."""
    candidates = [curve for curve in curves if curve.collective == key.collective]

    def distance(curve: CollectiveCurve) -> tuple[float, float, bool, int]:
        link = abs(math.log(links[curve.system] / links[key.system]))
        devices = abs(math.log(curve.devices / key.devices))
        is_other = curve.system != key.system
        other_version = bool(key.version) and curve.version != key.version
        return (link + 1e-6 * is_other, devices, other_version, -len(curve.sizes))

    return min(candidates, key=distance)


def build_curves(rows: Iterable[Mapping[str, str]]) -> list[CollectiveCurve]:
    """Return the curves of measured rows; repeated sizes are averaged geometrically."""
    groups: dict[tuple[str, str, str, int], dict[float, list[float]]] = {}
    for row in rows:
        key = (row["system"], row["version"], row["collective"], int(row["devices"]))
        sizes = groups.setdefault(key, {})
        sizes.setdefault(float(row["bytes"]), []).append(math.log(float(row["seconds"])))
    return [_build_curve(key, sizes) for key, sizes in groups.items()]


def _build_curve(
    key: tuple[str, str, str, int], sizes: Mapping[float, Sequence[float]]
) -> CollectiveCurve:
    system, version, collective, devices = key
    ordered = sorted(sizes)
    seconds = [math.exp(sum(sizes[size]) / len(sizes[size])) for size in ordered]
    return CollectiveCurve(system, version, collective, devices, ordered, seconds)  # type: ignore[arg-type]


@cache
def load_curves(path: Path = ROWS) -> Sequence[CollectiveCurve]:
    """Return the measured curves of the package."""
    return build_curves(read_csv_rows(path))
