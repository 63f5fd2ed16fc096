"""The tables of a run file that `benchmark` reads; nothing here imports torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from regauge.config import Settings
from regauge.training.settings import Training

BENCHMARK = "benchmark.json"


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
