"""What the planner is asked: a training job, and the machines that run it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from regauge.planner.model_shape import Head, ModelShape
from regauge.training.state_bytes import RunWeights
from regauge.training.strategies import Strategy

Logits = Literal["copied", "eager", "fused", "chunked", "streamed"]
Recomputation = Literal["none", "selective", "full"]
PrecisionPlan = Literal["fp32", "tf32", "autocast", "bf16-master", "pure", "fp8", "nf4"]
"""fp32; tf32 products; fp32 weights with bf16 autocast; bf16 weights with an fp32 master copy;
bf16 weights and optimizer alone; autocast with fp8 products; frozen 4-bit weights."""


@dataclass(frozen=True)
class ModelParallelism:
    """How one model is divided over devices, besides data parallelism."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    has_sequence_parallelism: bool = False
    """Whether tensor parallelism also divides layer inputs by position."""
    interleaved: int = 1
    """Layer groups per pipeline stage, by which the interleaved schedule divides its idle time."""

    @property
    def devices(self) -> int:
        """How many devices hold one copy of the model."""
        return self.tensor * self.pipeline * self.context


@dataclass(frozen=True)
class TrainingJob:
    """One training run: the model, one device's batch, and how the weights are placed."""

    shape: ModelShape
    length: int
    """Tokens per row, padding included."""
    micro_batch: int
    """Rows per device in one forward pass."""
    accumulation: int = 1
    """Forward passes before an update."""
    strategy: Strategy = field(kw_only=True)
    recomputation: Recomputation = "none"
    precision: PrecisionPlan = "autocast"
    head: Head = "lm"
    parallelism: ModelParallelism = field(default_factory=ModelParallelism)
    has_fused_attention: bool = True
    """Whether attention scores are never stored (flash attention, sdpa)."""
    has_fused_norms: bool = True
    """Whether gated layers' norms store no fp32 copies, because a compiler or kernel fuses them."""
    dropout: bool = False
    """Whether dropout stores masks and one more copy of the scores."""
    logits: Logits = "eager"
    """How the loss is computed: `memory_plan.LOGIT_BYTES`, or in Regauge's chunks."""
    optimizer: Literal["adamw", "sgd", "8bit"] = "adamw"
    has_fused_update: bool = True
    """Whether one kernel reads and writes all states."""
    has_fp32_gradients: bool = False
    """Whether gradients for bf16 weights are accumulated in fp32, as in Megatron."""
    trained_fraction: float = 1.0
    """Share of trained parameters; below 1 for LoRA."""
    useful_fraction: float = 1.0
    """Share of tokens that are not padding, from the prepared data's length histogram."""
    weights: RunWeights | None = None
    """A Regauge run's weights; published runs with other software only have a count."""
    batch_rows: int | None = None
    """Rows per update over all devices; None if each device computes as many passes."""
    stack: str | None = None
    """Calibration name; None for the chip's stack with the most rows."""

    @property
    def product_precision(self) -> str:
        """Precision of the products in the layers, as `machine_rates.find_peak` names it."""
        return self.precision if self.precision in ("fp32", "tf32", "fp8") else "half"

    @property
    def tokens_per_pass(self) -> int:
        """Tokens per device in one forward pass."""
        return self.length * self.micro_batch


@dataclass(frozen=True)
class Estimate:
    """A prediction with its interval: 80 % of the measurements are between p10 and p90."""

    p10: float
    p50: float
    p90: float

    def scale(self, factor: float) -> Estimate:
        return Estimate(self.p10 * factor, self.p50 * factor, self.p90 * factor)

    def invert(self, numerator: float) -> Estimate:
        """Return numerator / estimate; the interval's ends change places."""
        return Estimate(numerator / self.p90, numerator / self.p50, numerator / self.p10)
