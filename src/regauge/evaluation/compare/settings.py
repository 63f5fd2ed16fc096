"""Settings of `compare`: a run file's [comparison] table. This module does not import torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from regauge.config import Settings
from regauge.machines.settings import Price
from regauge.training.settings import Target

MIN_RUNS = 2
"""Minimum number of runs to compare."""


class Comparison(Settings):
    """Runs to compare, and how much they may differ."""

    runs: tuple[str, ...] = Field(min_length=MIN_RUNS)
    """Output folders; the first is the baseline."""
    tolerance: float = Field(default=0.001, gt=0)
    """Largest relative difference in a held-out metric that counts as equal."""
    metrics: tuple[str, ...] = ()
    """Held-out metrics for the verdict; default: all measured by both runs."""
    noise_runs: tuple[str, ...] = ()
    """Output folders for baseline repeats with another summation order (noise floor)."""
    target: Target | None = None
    """Target for the cost comparison; default: the best value reached by all runs."""
    prices: tuple[Price, ...] = ()
    """Machine price per run, in order; replaces the run files' prices."""
    reference_precision: Literal["fp32", "fp64"] = "fp32"
    """CPU precision of the reference for both runs with `--localize`."""
    on_difference: Literal["fail", "warn"] = "fail"
    """Whether a difference fails the command (exit code 68) or is only reported."""

    @model_validator(mode="after")
    def _check_num_prices(self) -> Comparison:
        if self.prices and len(self.prices) != len(self.runs):
            count = len(self.runs)
            raise ValueError(f"{count} runs need {count} prices; give them in the order of runs")
        return self
