"""Training FLOPs per token by part, and model FLOPs utilization (MFU).

The formula is `models.flops.FLOPS_FORMULA`, to which a plan adds the output layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.models.flops import compute_flops

if TYPE_CHECKING:
    from regauge.planner.model_shape import Head, ModelShape
    from regauge.planner.training_job import TrainingJob

MASKED_FRACTION = 0.15
"""Share of positions for which a masked language model computes logits."""
RECOMPUTED = {"none": 0.0, "selective": 0.4, "full": 1.0}
"""Share rho of the forward pass that the backward pass recomputes."""
FORWARD_SHARE = 1 / 3


def head_flops(shape: ModelShape, head: Head) -> float:
    """Return training FLOPs per token for the output layer: 6 E per position."""
    if head == "none":
        return 0.0
    positions = MASKED_FRACTION if head == "masked-lm" else 1.0
    weights = shape.logit_matmul + shape.head_matmul
    return compute_flops(weights, weights) * positions


def matmul_flops(shape: ModelShape) -> float:
    """Return training FLOPs per token for the weights in all layers: 6 N."""
    weights = shape.layers * shape.active_matmul
    return compute_flops(weights, weights)


def attention_flops(shape: ModelShape, length: int) -> float:
    """Return training FLOPs per token for attention: 12 L h S.

    h is heads x head_dim; S is the mean number of attended positions, without a causal mask.
    """
    attended = shape.layers * shape.attention.width * shape.attention_span(length)
    return compute_flops(0, 0, attended)


def training_flops(shape: ModelShape, length: int, head: Head = "lm") -> float:
    """Return model FLOPs for training on one token in a row with `length` tokens."""
    return matmul_flops(shape) + head_flops(shape, head) + attention_flops(shape, length)


def mfu(job: TrainingJob, tokens_per_second: float, peak_flops: float) -> float:
    """Return model FLOPs utilization at one device's tokens per second."""
    return tokens_per_second * training_flops(job.shape, job.length, job.head) / peak_flops
