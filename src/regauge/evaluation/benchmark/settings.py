"""Settings of `benchmark`: tables of a run file. This module imports no torch."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from regauge.config import Settings
from regauge.machines.settings import Price
from regauge.training.settings import Output, TrainSettings

ARTIFACT_NAME = re.compile(r"\w[\w .+-]*")
"""Pattern of artifact names; files and columns are named after them."""

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]


class Benchmark(Settings):
    """Benchmark of training on growing numbers of processes."""

    processes: tuple[int, ...] = ()
    """Numbers of processes per machine; by default 1, 2, 4, ... up to one per device."""
    scaling: Literal["weak", "strong"] = "weak"
    """Weak scaling grows batch and learning rate with the processes; strong keeps the batch."""
    steps: int = Field(default=20, ge=1)
    """Timed steps per short run."""
    warmup_steps: int = Field(default=5, ge=1)
    """Steps before the timed ones."""
    repeats: int = Field(default=2, ge=1)
    """Short runs per process count, alternating between the counts."""


class TrainingBenchmarkSettings(TrainSettings):
    """All settings of a training benchmark."""

    benchmark: Benchmark = Benchmark()
    """Process counts, steps and repeats."""


class Inference(Settings):
    """Artifacts to measure, requests and duration."""

    artifacts: dict[str, str] = Field(min_length=1)
    """Artifact folders by name."""
    batch_sizes: tuple[Positive, ...] = Field(default=(1, 10), min_length=1)
    """Records per request to measure."""
    input_lengths: tuple[Positive, ...] = Field(default=(256, 128), min_length=1)
    """Real tokens of each text; the defaults are limited to what all artifacts accept."""
    duration_seconds: float = Field(default=5.0, gt=0)
    """Duration of the closed loop, for each batch size and input length in a repeat."""
    warmup_requests: int = Field(default=2, ge=1)
    """Requests before the timed ones."""
    repeats: int = Field(default=3, ge=1)
    """Repeats of each artifact in a separate process, alternating between the artifacts."""
    compare: tuple[tuple[str, str], ...] = ()
    """Pairs of names; the second is compared with the first. By default all with the first one."""
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
    """Rates of Poisson arrivals in requests per second, the same for all artifacts."""
    duration_seconds: float = Field(default=5.0, gt=0)
    """Duration of the arrivals, for each rate, batch size and input length in a repeat."""


class MachineSettings(Settings):
    """Machine of the benchmark."""

    price: Price = Price()
    """Price of this machine."""


class BenchmarkSettings(Settings):
    """All settings of an inference benchmark."""

    output: Output
    """Folder of the benchmark document, its tables and its chart."""
    seed: int = Field(default=0, ge=0)
    """Seed for the arrival times and the token ids in the requests."""
    inference: Inference
    """Artifacts, requests and duration."""
    open_loop: OpenLoop = OpenLoop()
    """Arrival rates of the open loop."""
    execution: MachineSettings = MachineSettings()
    """Machine of the benchmark."""
