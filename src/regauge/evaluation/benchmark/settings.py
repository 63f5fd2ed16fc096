"""Settings of `benchmark`: run file tables. This module does not import torch."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from regauge.config import Settings
from regauge.machines.settings import Price
from regauge.training.settings import Output, TrainSettings

ARTIFACT_NAME = re.compile(r"\w[\w .+-]*")
"""Permitted artifact names; files and columns are named after them."""

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]


class Benchmark(Settings):
    """Training benchmark on growing process counts."""

    processes: tuple[int, ...] = ()
    """Process counts per machine; default: 1, 2, 4, ... up to one per device."""
    scaling: Literal["weak", "strong"] = "weak"
    """Weak scaling grows batch and learning rate with the processes; strong keeps the batch."""
    steps: int = Field(default=20, ge=1)
    """Timed steps per short run."""
    warmup_steps: int = Field(default=5, ge=1)
    """Steps before the timed ones."""
    repeats: int = Field(default=2, ge=1)
    """Short runs per process count, alternating between the counts."""


class TrainingBenchmarkSettings(TrainSettings):
    """All training benchmark settings."""

    benchmark: Benchmark = Benchmark()
    """Process counts, steps and repeats."""


class Inference(Settings):
    """Artifacts to measure, requests and duration."""

    artifacts: dict[str, str] = Field(min_length=1)
    """Name -> artifact folder."""
    batch_sizes: tuple[Positive, ...] = Field(default=(1, 10), min_length=1)
    """Records per request to measure."""
    input_lengths: tuple[Positive, ...] = Field(default=(256, 128), min_length=1)
    """Real tokens per text; the defaults are limited to what all artifacts accept."""
    duration_seconds: float = Field(default=5.0, gt=0)
    """Closed-loop seconds per batch size and input length in a repeat."""
    warmup_requests: int = Field(default=2, ge=1)
    """Requests before the timed ones."""
    repeats: int = Field(default=3, ge=1)
    """Repeats of each artifact in a separate process, alternating between artifacts."""
    compare: tuple[tuple[str, str], ...] = ()
    """Name pairs; the second is compared with the first. Default: all with the first artifact."""
    timeout_seconds: int = Field(default=900, ge=1)
    """Seconds without progress after which an artifact is stopped and reported."""

    @model_validator(mode="after")
    def _check_names_and_duplicates(self) -> Inference:
        for name in self.artifacts:
            if not ARTIFACT_NAME.fullmatch(name):
                raise ValueError(f"invalid artifact name '{name}'; use letters, digits and . + -")
        for key in ("batch_sizes", "input_lengths"):
            values = getattr(self, key)
            if len(set(values)) < len(values):
                numbers = ", ".join(map(str, values))
                raise ValueError(f"{key} has duplicates: {numbers}; remove them")
        return self


class OpenLoop(Settings):
    """Open loop: requests arrive at a rate, whether or not earlier ones are answered."""

    load_fractions: tuple[Rate, ...] = (0.5, 0.8)
    """Poisson arrival rates, as fractions of each artifact's closed-loop throughput."""
    requests_per_second: tuple[Rate, ...] = ()
    """Poisson arrival rates in requests per second, equal for all artifacts."""
    duration_seconds: float = Field(default=5.0, gt=0)
    """Seconds of arrivals per rate, batch size and input length in a repeat."""


class MachineSettings(Settings):
    """Benchmark machine."""

    price: Price = Price()
    """This machine's price."""


class BenchmarkSettings(Settings):
    """All settings of an inference benchmark."""

    output: Output
    """Folder for the benchmark document, tables and chart."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed for the arrival times and the token ids in the requests."""
    inference: Inference
    """Artifacts, requests and duration."""
    open_loop: OpenLoop = OpenLoop()
    """Open-loop arrival rates."""
    execution: MachineSettings = MachineSettings()
    """Benchmark machine."""
