"""Measured runs near a prediction: the published rows of the package, and the user's own runs.

A run writes its measured step time and peak memory beside what the planner predicted. The next
prediction is corrected by the errors of the nearest runs, and its error history is printed.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import jsonl
from regauge.files import read_csv_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from regauge.planning.training_job import Machine, TrainingJob

MEASURED = Path(__file__).with_name("measured_training.csv")
OTHER_CHIP, OTHER_STACK, OTHER_RECOMPUTATION = 6.0, 2.0, 1.0
"""Distances of a row on another chip, under another stack, with other recomputation."""
REACH = 0.7
"""Distance over which the error of a run counts for another one."""
PRIOR_WEIGHT = 0.1
"""Weight of no correction beside the weights of the near runs."""


@dataclass(frozen=True)
class Features:
    """What makes two runs alike; sizes are compared by their logarithms."""

    chip: str
    stack: str
    recomputation: str
    layers: int
    hidden: int
    length: int
    tokens_per_pass: int
    accumulation: int
    devices: int

    def distance(self, other: Features) -> float:
        """Return the distance: 1 for a factor of e in one size."""
        squares = sum(
            math.log(getattr(self, name) / getattr(other, name)) ** 2 * weight
            for name, weight in SIZE_WEIGHTS.items()
        )
        squares += OTHER_CHIP**2 * (self.chip != other.chip)
        squares += OTHER_STACK**2 * (self.stack != other.stack)
        squares += OTHER_RECOMPUTATION**2 * (self.recomputation != other.recomputation)
        return math.sqrt(squares)


SIZE_WEIGHTS = {
    "layers": 0.25,
    "hidden": 1.0,
    "length": 0.5,
    "tokens_per_pass": 0.5,
    "accumulation": 0.1,
    "devices": 0.25,
}
"""Weight of each size in the distance: step time is less sensitive to those below 1."""


@dataclass(frozen=True)
class Anchor:
    """A measured run beside its prediction without anchors."""

    name: str
    features: Features
    measured_seconds: float
    """Seconds of a step."""
    predicted_seconds: float
    source: str
    date: str = ""
    measured_bytes: float | None = None
    """Peak memory of one device."""
    predicted_bytes: float | None = None

    @property
    def log_error(self) -> float:
        """Return log(measured / predicted) of the step time."""
        return math.log(self.measured_seconds / self.predicted_seconds)

    @property
    def log_memory_error(self) -> float | None:
        """Return log(measured / predicted) of the memory; None without a measurement."""
        if not self.measured_bytes or not self.predicted_bytes:
            return None
        return math.log(self.measured_bytes / self.predicted_bytes)


@dataclass(frozen=True)
class Neighbour:
    """A measured run and its distance to a prediction."""

    distance: float
    anchor: Anchor


def describe(job: TrainingJob, machine: Machine, count: int) -> Features:
    """Return the features of a job on `count` machines."""
    return Features(
        chip=machine.chip,
        stack=job.stack or "",
        recomputation=job.recomputation,
        layers=job.shape.layers,
        hidden=job.shape.hidden,
        length=job.length,
        tokens_per_pass=job.tokens_per_pass,
        accumulation=job.accumulation,
        devices=machine.devices * count,
    )


def find_nearest(
    features: Features, anchors: Iterable[Anchor], limit: int = 3
) -> tuple[Neighbour, ...]:
    """Return the nearest measured runs, nearest first."""
    neighbours = [Neighbour(features.distance(item.features), item) for item in anchors]
    return tuple(sorted(neighbours, key=lambda item: item.distance)[:limit])


def correct(neighbours: Sequence[Neighbour]) -> float:
    """Return the factor by which the errors of near runs correct a predicted step time."""
    errors = [(item.distance, item.anchor.log_error) for item in neighbours]
    return math.exp(_weighted_error(errors))


def correct_memory(neighbours: Sequence[Neighbour]) -> float:
    """Return the factor by which the errors of near runs correct a predicted peak memory."""
    errors = [(item.distance, item.anchor.log_memory_error) for item in neighbours]
    return math.exp(_weighted_error([(d, e) for d, e in errors if e is not None]))


def _weighted_error(errors: Sequence[tuple[float, float]]) -> float:
    weights = [math.exp(-0.5 * (distance / REACH) ** 2) for distance, _ in errors]
    total = sum(weight * error for weight, (_, error) in zip(weights, errors, strict=True))
    return total / (sum(weights) + PRIOR_WEIGHT)


@cache
def load_published(path: Path = MEASURED) -> tuple[Anchor, ...]:
    """Return the published rows of the package."""
    return tuple(_parse_row(row) for row in read_csv_rows(path))


def _parse_row(row: dict[str, str]) -> Anchor:
    sizes = {name: int(row[name]) for name in SIZE_WEIGHTS}
    features = Features(row["chip"], row["stack"], row["recomputation"], **sizes)
    return Anchor(
        row["name"],
        features,
        float(row["measured_seconds"]),
        float(row["predicted_seconds"]),
        row["source"],
        row["date"],
    )


def find_history() -> Path:
    """Return the file of the user's measured runs, by the XDG Base Directory Specification."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return base / "regauge" / "planner_runs.jsonl"


def record_run(anchor: Anchor, path: Path | None = None) -> None:
    """Append a measured run to the user's history."""
    path = path or find_history()
    path.parent.mkdir(parents=True, exist_ok=True)
    jsonl.append_line(path, asdict(anchor))


def load_history(path: Path | None = None) -> tuple[Anchor, ...]:
    """Return the user's measured runs, oldest first; a damaged line is skipped with a warning."""
    path = path or find_history()
    if not path.exists():
        return ()
    return tuple(_parse_document(line) for line in jsonl.read_lines(path))


def _parse_document(document: dict[str, Any]) -> Anchor:
    names = {item.name for item in fields(Anchor)} - {"features"}
    values = {name: document[name] for name in names if name in document}
    return Anchor(features=Features(**document["features"]), **values)
