"""Measured runs near a prediction: published rows from the package, and the user's own runs.

The planner's errors on the nearest runs correct a prediction. `run_history` stores the user's runs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.system.files import read_csv_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from regauge.machines.machine_rates import MachineRates
    from regauge.planner.training_job import TrainingJob

MEASURED = Path(__file__).with_name("measured_training.csv")
OTHER = {"chip": 6.0, "stack": 2.0, "recomputation": 1.0, "strategy": 0.7}
"""Distance to a row with another chip, stack, recomputation or strategy."""
OTHER_IN_MEMORY = OTHER | {"chip": 0.3}
"""The same for memory, which depends on the chip only through its libraries."""
OTHER_PRECISION = 1.0
"""Distance to a run with another precision."""
PER_YEAR = 0.7
"""Distance for each year between two measurements."""
MIDDLE_MONTH = 7
"""Assumed month for a date that only has a year."""
REACH = 0.4
"""Length scale of the kernel that averages errors from nearby runs."""
PRIOR_WEIGHT = 0.1
"""Weight for "no correction" beside the nearby runs' weights."""
OWN_WEIGHT = 10.0
"""Weight of a user's run relative to a published one: it has the same software."""


@dataclass(frozen=True)
class Features:
    """What makes two runs alike; sizes are compared by their logarithms."""

    chip: str
    stack: str
    recomputation: str
    strategy: str
    """Strategy and degrees of tensor, pipeline and context parallelism."""
    layers: int
    hidden: int
    length: int
    tokens_per_pass: int
    accumulation: int
    devices: int
    year: float = 0.0
    """Measurement year, with its fraction; 0 if unknown. Software changes with time."""
    precision: str = ""
    """Weight and product precision; empty if unknown."""

    @cached_property
    def scaled_logs(self) -> tuple[float, ...]:
        """Logarithms of the sizes, scaled by the square roots of their weights."""
        return tuple(
            math.log(getattr(self, name)) * math.sqrt(weight)
            for name, weight in SIZE_WEIGHTS.items()
        )

    @cached_property
    def placement(self) -> str:
        """The strategy; replicas on one device count as a single model."""
        return self.strategy.replace("ddp", "single") if self.devices == 1 else self.strategy

    def distance(self, other: Features, differences: Mapping[str, float] = OTHER) -> float:
        """Return the distance: 1 for a factor of e in one size with weight 1."""
        squares = math.dist(self.scaled_logs, other.scaled_logs) ** 2
        for name, distance in differences.items():
            attribute = "placement" if name == "strategy" else name
            if getattr(self, attribute) != getattr(other, attribute):
                squares += distance**2
        if self.year and other.year:
            squares += (PER_YEAR * (self.year - other.year)) ** 2
        if self.precision and other.precision and self.precision != other.precision:
            squares += OTHER_PRECISION**2
        return math.sqrt(squares)


SIZE_WEIGHTS = {
    "layers": 0.25,
    "hidden": 1.0,
    "length": 0.5,
    "tokens_per_pass": 0.5,
    "accumulation": 0.1,
    "devices": 0.25,
}
"""Weight per size in the distance: step time is less sensitive to those below 1."""


MEASUREMENTS = ("measured_seconds", "predicted_seconds", "measured_bytes", "predicted_bytes")


@dataclass(frozen=True)
class Anchor:
    """A measured run beside its prediction without anchors."""

    name: str
    features: Features
    source: str
    measured_seconds: float | None = None
    """Seconds per step; None if not measured."""
    predicted_seconds: float | None = None
    date: str = ""
    measured_bytes: float | None = None
    """Peak memory per device."""
    predicted_bytes: float | None = None
    run_id: str = ""
    """Id for a user's run; empty for a published row."""
    planned_seconds: float | None = None
    """Seconds per step that `plan` printed before the run, corrected by earlier runs."""
    planned_bytes: float | None = None
    machine: MachineRates | None = None

    @property
    def log_error(self) -> float | None:
        """Return log(measured / predicted) for the step time; None without a measurement."""
        if not self.measured_seconds or not self.predicted_seconds:
            return None
        return math.log(self.measured_seconds / self.predicted_seconds)

    @property
    def log_memory_error(self) -> float | None:
        """Return log(measured / predicted) for the memory; None without a measurement."""
        if not self.measured_bytes or not self.predicted_bytes:
            return None
        return math.log(self.measured_bytes / self.predicted_bytes)


@dataclass(frozen=True)
class Neighbour:
    """A measured run and its distance to a prediction."""

    distance: float
    anchor: Anchor


def describe(job: TrainingJob, machine: MachineRates, count: int) -> Features:
    parallel = job.parallelism
    return Features(
        chip=machine.chip,
        stack=job.stack or "",
        recomputation=job.recomputation,
        strategy=f"{job.strategy.kind} {parallel.tensor}.{parallel.pipeline}.{parallel.context}",
        layers=job.shape.layers,
        hidden=job.shape.hidden,
        length=job.length,
        tokens_per_pass=job.tokens_per_pass,
        accumulation=job.accumulation,
        devices=machine.devices * count,
        precision=job.precision,
    )


def find_nearest(
    features: Features, anchors: Iterable[Anchor], limit: int = 3
) -> tuple[Neighbour, ...]:
    """Return the nearest measured runs on the chip, nearest first; on others if they are few."""
    anchors = tuple(anchors)
    same_chip = [item for item in anchors if item.features.chip == features.chip]
    return _sort(features, same_chip if len(same_chip) >= limit else anchors, OTHER)[:limit]


def find_nearest_memory(
    features: Features, anchors: Iterable[Anchor], limit: int = 3
) -> tuple[Neighbour, ...]:
    """Return the runs with the nearest memory, nearest first; all chips count."""
    near = [item for item in anchors if item.log_memory_error is not None]
    return _sort(features, near, OTHER_IN_MEMORY)[:limit]


def _sort(
    features: Features, anchors: Iterable[Anchor], differences: Mapping[str, float]
) -> tuple[Neighbour, ...]:
    near = [Neighbour(features.distance(item.features, differences), item) for item in anchors]
    return tuple(sorted(near, key=lambda item: item.distance))


def correct(neighbours: Sequence[Neighbour]) -> float:
    """Return the factor by which nearby runs' errors correct a predicted step time."""
    return _average_errors((_weigh(item), item.anchor.log_error) for item in neighbours)


def correct_memory(neighbours: Sequence[Neighbour]) -> float:
    """Return the factor by which nearby runs' errors correct a predicted peak memory."""
    return _average_errors((_weigh(item), item.anchor.log_memory_error) for item in neighbours)


def _average_errors(errors: Iterable[tuple[float, float | None]]) -> float:
    """Return the factor of the weighted mean error, shrunk by the weight for "no correction"."""
    known = [(weight, error) for weight, error in errors if error is not None]
    total = sum(weight * error for weight, error in known)
    return math.exp(total / (sum(weight for weight, _ in known) + PRIOR_WEIGHT))


def _weigh(neighbour: Neighbour) -> float:
    """Return a run's weight by distance; the user's runs weigh more."""
    weight = OWN_WEIGHT if neighbour.anchor.run_id else 1.0
    return weight * math.exp(-0.5 * (neighbour.distance / REACH) ** 2)


@cache
def load_published() -> tuple[Anchor, ...]:
    """Return the package's published step times."""
    return tuple(_parse_row(row) for row in read_csv_rows(MEASURED))


def _parse_row(row: dict[str, str]) -> Anchor:
    sizes: dict[str, Any] = {name: int(row[name]) for name in SIZE_WEIGHTS}
    names: dict[str, Any] = {name: row[name] for name in OTHER}
    values: dict[str, Any] = {
        name: float(row[name]) if row.get(name) else None for name in MEASUREMENTS
    }
    features = Features(
        **names, **sizes, year=parse_year(row["date"]), precision=row.get("precision", "")
    )
    return Anchor(row["name"], features, row["source"], date=row["date"], **values)


def parse_year(date: str) -> float:
    """Return the year in a date such as 2024-09-16, with its fraction; 0 if empty."""
    match = re.match(r"(\d{4})(?:-(\d{2}))?", date)
    if match is None:
        return 0.0
    return int(match[1]) + (int(match[2] or MIDDLE_MONTH) - 1) / 12
