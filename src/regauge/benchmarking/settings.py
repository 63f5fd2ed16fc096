"""The tables of a run file that `benchmark` reads; nothing here imports torch."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from regauge.config import Settings
from regauge.planning.settings import Price
from regauge.training.settings import Output, Training

BENCHMARK = "benchmark.json"
NAME = re.compile(r"\w[\w .+-]*")
"""What an artifact may be called: files and columns are named after it."""

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]


class Benchmark(Settings):
    """How training is measured on growing numbers of processes."""

    processes: tuple[int, ...] = ()
    """Processes on each machine that are measured; by default 1, 2, 4 ..., to one a device."""
    scaling: Literal["weak", "strong"] = "weak"
    """Whether each process has as many rows and the learning rate grows, or the batch stays."""
    steps: int = Field(default=20, ge=1)
    """Steps of a turn that are timed."""
    warmup_steps: int = Field(default=5, ge=1)
    """Steps before them that are not."""
    turns: int = Field(default=2, ge=1)
    """Turns of each number of processes; all of them have one before any has the next."""


class Benchmarking(Training):
    """Everything about a benchmark of training."""

    benchmark: Benchmark = Benchmark()
    """What is measured."""


class Inference(Settings):
    """Which artifacts are measured, on which requests, and for how long."""

    artifacts: dict[str, str] = Field(min_length=1)
    """Name of each, and its folder."""
    rows: tuple[Positive, ...] = Field(default=(1, 10), min_length=1)
    """Records of a request: its batch."""
    lengths: tuple[Positive, ...] = Field(default=(256, 128), min_length=1)
    """Real tokens of each text; those by default are no more than all artifacts read."""
    seconds: float = Field(default=5.0, gt=0)
    """How long requests follow each other, for each batch and length of a turn."""
    warmup: int = Field(default=2, ge=1)
    """Requests before them that are not timed."""
    turns: int = Field(default=3, ge=1)
    """Turns of each artifact, in a process of its own; all have one before any has the next."""
    beside: tuple[tuple[str, str], ...] = ()
    """Names that are set side by side, the second by the first; by default all by the first."""
    timeout_seconds: int = Field(default=900, ge=1)
    """How long an artifact may say nothing; then it is stopped, and named."""

    @model_validator(mode="after")
    def _each_once(self) -> Inference:
        for name in self.artifacts:
            if not NAME.fullmatch(name):
                raise ValueError(f"'{name}' names no artifact: use letters, digits and . + -")
        for key, values in (("rows", self.rows), ("lengths", self.lengths)):
            if len(set(values)) < len(values):
                raise ValueError(f"{key} has a number twice: {', '.join(map(str, values))}")
        return self


class Arrivals(Settings):
    """Requests that come when they come, whether or not the one before is answered."""

    shares: tuple[Rate, ...] = (0.5, 0.8)
    """Rates of Poisson arrivals, as shares of what each artifact answers one after the other."""
    rates: tuple[Rate, ...] = ()
    """Rates that are the same for all artifacts, in requests a second."""
    seconds: float = Field(default=5.0, gt=0)
    """How long they come, for each rate of a batch and length in a turn."""


class Machine(Settings):
    """Where it is measured."""

    price: Price = Price()
    """What an hour of this machine costs."""


class Measuring(Settings):
    """Everything about a benchmark of inference."""

    output: Output
    """The folder that the tables are written to."""
    seed: int = Field(default=0, ge=0)
    """Key of the arrivals, and of the words in the texts."""
    inference: Inference
    """What is measured."""
    arrivals: Arrivals = Arrivals()
    """How requests come."""
    execution: Machine = Machine()
    """Where it is measured."""
