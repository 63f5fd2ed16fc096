"""The table of a run file that `replay` reads; this module imports no torch."""

from __future__ import annotations

from pydantic import Field

from regauge.config import Settings
from regauge.training.settings import TrainSettings


class ReplaySteps(Settings):
    """The steps to replay, and the steps to capture."""

    until: int = Field(ge=1)
    """Last step to replay."""
    checkpoint: str | None = None
    """Checkpoint folder to start from; by default the run's initial weights."""
    capture_steps: tuple[int, ...] = ()
    """Steps whose values are captured module by module, counted from 0."""
    save_at_step: int | None = Field(default=None, ge=0)
    """Number of steps after which a checkpoint is saved."""
    fault_plan: str | None = None
    """File with the fault plan of the run, to inject the same faults again."""
    noise: float = Field(default=0.0, ge=0)
    """Largest random relative change to the output of each leaf module."""
    float64: bool = False
    """Compute in fp64, on a CPU."""


class ReplaySettings(TrainSettings):
    """All settings of a run, and the steps to replay."""

    replay: ReplaySteps
    """The steps to replay."""
