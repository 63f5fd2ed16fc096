"""The tables of a run file that say how gradients change the weights; no torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from regauge.config import Settings

Share = Annotated[float, Field(ge=0, lt=1)]


class Schedule(Settings):
    """The learning rate over the steps."""

    kind: Literal["constant", "linear", "cosine", "polynomial", "wsd"] = "linear"
    """Shape of the decay after the warm-up; wsd stays at the peak until its last steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    final_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak that is left at the last step."""
    power: float = Field(default=2.0, gt=0)
    """Exponent of the polynomial decay."""
    decay_share: float = Field(default=0.1, gt=0, le=1)
    """Share of all steps, the last ones, in which wsd decays, linearly."""


class Guarding(Settings):
    """What is kept out of the weights."""

    not_finite: Literal["skip", "roll-back", "stop"] = "skip"
    """What follows a step whose gradients are not finite; it never changes a weight."""
    spike: Literal["say", "skip", "roll-back", "stop"] = "say"
    """What follows a step whose loss or gradient norm is far above the usual."""
    deviations: float = Field(default=8.0, gt=0)
    """Standard deviations above its running mean at which a value is far above the usual."""
    skipped_in_a_row: int = Field(default=3, ge=1)
    """Steps in a row that may be skipped; then the run goes back to its last checkpoint, once."""
    check_every_steps: int = Field(default=500, ge=1)
    """Steps between two comparisons of the replicas' weights; each save compares them, too."""


class Optimizer(Settings):
    """How gradients change the weights."""

    kind: Literal["adamw", "lamb", "sgd", "adafactor"] = "adamw"
    """The rule: torch's own, or LAMB (You et al., 2020), for large batches."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    """Decay of the first and second moment (adamw, lamb); the first is the momentum of sgd."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment (adamw, lamb)."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled decay of matrices; vectors (biases, norms) are not decayed."""
    shares: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Shares of the learning rate by how a weight's name begins, such as `{"model." = 0.1}`."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest global gradient norm."""
    schedule: Schedule = Schedule()
    """The learning rate over the steps."""
    guard: Guarding = Guarding()
    """What is kept out of the weights."""
