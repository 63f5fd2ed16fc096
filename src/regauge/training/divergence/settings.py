"""The `replay` table; this module imports no torch."""

from __future__ import annotations

from pydantic import Field

from regauge.config import Settings
from regauge.training.settings import TrainSettings


class ReplaySteps(Settings):
    """Which steps to replay, and which to capture."""

    until: int = Field(ge=1)
    """Last step to replay."""
    checkpoint: str | None = None
    """Checkpoint folder to start from; by default the run's initial weights."""
    capture_steps: tuple[int, ...] = ()
    """Steps to capture module by module, counted from 0."""
    save_at_step: int | None = Field(default=None, ge=0)
    """Save a checkpoint after this many steps."""
    fault_plan: str | None = None
    """The run's fault plan file, to inject the same faults again."""
    noise: float = Field(default=0.0, ge=0)
    """Largest random relative change to each leaf module's output."""
    float64: bool = False
    """Compute in fp64, on a CPU."""


class ReplaySettings(TrainSettings):
    """All run settings, and the steps to replay."""

    replay: ReplaySteps
    """The steps to replay."""
