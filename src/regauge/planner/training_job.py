"""What the planner is asked: a training job, and the machines that run it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from regauge.planner.model_shape import Head, ModelShape
from regauge.training.state_bytes import RunWeights
from regauge.training.strategies import Strategy

Recomputation = Literal["none", "selective", "full"]
PrecisionPlan = Literal["fp32", "tf32", "autocast", "bf16-master", "pure", "fp8", "nf4"]
"""fp32; tf32 products; fp32 weights with bf16 autocast; bf16 weights with an fp32 master copy;
bf16 weights and optimizer alone; autocast with fp8 products; frozen 4-bit weights."""


@dataclass(frozen=True)
class ModelParallelism:
    """Division of one model over devices, besides data parallelism."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    has_sequence_parallelism: bool = False
    """Tensor parallelism divides the inputs of a layer by position, too."""
    interleaved: int = 1
    """Groups of layers of one pipeline stage, by which the interleaved schedule divides its idle
    time."""

    @property
    def devices(self) -> int:
        """Number of devices that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context


@dataclass(frozen=True)
class TrainingJob:
    """One training run: the model, the batch of one device, and how the weights are placed."""

    shape: ModelShape
    length: int
    """Tokens of a row, padding included."""
    micro_batch: int
    """Rows of one device in one forward pass."""
    accumulation: int = 1
    """Forward passes before an update."""
    strategy: Strategy = field(kw_only=True)
    recomputation: Recomputation = "none"
    precision: PrecisionPlan = "autocast"
    head: Head = "lm"
    parallelism: ModelParallelism = field(default_factory=ModelParallelism)
    has_fused_attention: bool = True
    """The scores of the attention are never stored (flash attention, sdpa)."""
    has_fused_norms: bool = True
    """The norms of gated layers store no fp32 copies: a compiler or a kernel fuses them."""
    dropout: bool = False
    """Dropout stores masks and one more copy of the scores."""
    logits: Literal["eager", "fused", "chunked"] = "eager"
    """How the loss is computed: 10, 4 or 1 bytes for each logit."""
    optimizer: Literal["adamw", "sgd", "8bit"] = "adamw"
    has_fp32_gradients: bool = False
    """Gradients of bf16 weights are accumulated in fp32, as Megatron does."""
    trained_fraction: float = 1.0
    """Share of the parameters that are trained; below 1 for LoRA."""
    useful_fraction: float = 1.0
    """Share of the tokens that are not padding, by the length histogram of the prepared data."""
    weights: RunWeights | None = None
    """Weights of a run of Regauge; published runs of other software have their number alone."""
    stack: str | None = None
    """Name of the calibration to use; None for the one of the chip with the most rows."""

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of one device in one forward pass."""
        return self.length * self.micro_batch


@dataclass(frozen=True)
class Estimate:
    """A prediction with its interval: 80 % of the measurements are between p10 and p90."""

    p10: float
    p50: float
    p90: float

    def scale(self, factor: float) -> Estimate:
        """Return the estimate times a positive factor."""
        return Estimate(self.p10 * factor, self.p50 * factor, self.p90 * factor)

    def invert(self, numerator: float) -> Estimate:
        """Return numerator / estimate; the ends of the interval change places."""
        return Estimate(numerator / self.p90, numerator / self.p50, numerator / self.p10)
