"""The tables of a run file that `compare` reads; this module imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from regauge.config import Settings
from regauge.planning.settings import Price
from regauge.training.settings import Target

PAIR = 2
"""The fewest runs of a comparison."""


class Comparison(Settings):
    """Which runs are compared, and how much they may differ."""

    runs: tuple[str, ...] = Field(min_length=PAIR)
    """Output folders; each is compared with the first."""
    band: float = Field(default=0.001, gt=0)
    """Largest relative difference of a held-out metric that counts as none."""
    metrics: tuple[str, ...] = ()
    """Held-out metrics that the verdict is about; by default all that the runs measured."""
    noise: tuple[str, ...] = ()
    """Output folders of repetitions of the first run, in another order of its sums."""
    target: Target | None = None
    """What counts as converged; by default the first held-out metric that all runs came to."""
    prices: tuple[Price, ...] = ()
    """What a machine of each run costs, in their order, instead of what its run file says."""
    reference: Literal["fp32", "fp64"] = "fp32"
    """Type of the CPU's computation that `--localise` measures both runs by."""
    on_difference: Literal["fail", "say"] = "fail"
    """Whether a difference ends the command with code 68."""

    @model_validator(mode="after")
    def _each_has_its_price(self) -> Comparison:
        if self.prices and len(self.prices) != len(self.runs):
            raise ValueError(f"{len(self.runs)} runs need {len(self.runs)} prices, in their order")
        return self
