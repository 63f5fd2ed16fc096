"""The checkpoint table of a run file; this module imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from regauge.config import Settings


class Checkpoint(Settings):
    """When the run saves, and what it keeps."""

    every_steps: int = Field(default=500, ge=1)
    """Steps between two saves; the last step is always saved."""
    root: str | None = None
    """Object store that holds the checkpoints as well, such as `s3://bucket/run`."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
    best: str | None = None
    """Held-out metric whose best checkpoint is kept as well, such as `heldout/recall@10`."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which end of the metric is the best."""
    writing: Literal["background", "blocking"] = "background"
    """Whether training goes on while a checkpoint is written."""
