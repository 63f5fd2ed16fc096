"""The checkpoint table; this module imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from regauge.config import Settings


class Checkpoint(Settings):
    """When to save checkpoints, and which ones to keep."""

    every_steps: int = Field(default=500, ge=1)
    """Steps between saves; the last step is always saved."""
    remote: str | None = None
    """Object store for checkpoint copies, such as `s3://bucket/run`."""
    keep_last: int = Field(default=2, ge=1)
    """How many of the newest checkpoints to keep."""
    best_metric: str = "auto"
    """Held-out metric whose best checkpoint is kept as well, such as `heldout/recall@10`. Every
    evaluation with a new best value is saved. `auto` is the first task's loss; `off` keeps none."""
    best_mode: Literal["auto", "max", "min"] = "auto"
    """Whether the metric is maximized or minimized. `auto` is as the task declares;
    a custom metric needs `max` or `min`."""
    async_save: bool = True
    """Continue training while a checkpoint is written."""
