"""FLOPs of training on one token, model FLOPs utilization (MFU), and hardware utilization (HFU).

A product of [m, k] and [k, n] has 2 m n k FLOPs. The backward pass has twice those of the forward
pass. Source of 6 N + 12 L h S: Chowdhery et al., 2022 (PaLM), appendix B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regauge.planner.model_shape import Head, ModelShape
    from regauge.planner.training_job import Recomputation, TrainingJob

MASKED_FRACTION = 0.15
"""Share of the positions that a masked language model computes logits for."""
RECOMPUTED = {"none": 0.0, "selective": 0.4, "full": 1.0}
"""Share of the forward pass that is computed again in the backward pass."""
FORWARD_SHARE = 1 / 3


def head_flops(shape: ModelShape, head: Head) -> float:
    """Return the training FLOPs of the output layer for one token: 6 E for each position."""
    if head == "none":
        return 0.0
    positions = MASKED_FRACTION if head == "masked-lm" else 1.0
    return 6.0 * (shape.logit_matmul + shape.head_matmul) * positions


def matmul_flops(shape: ModelShape) -> float:
    """Return the training FLOPs of the weights of all layers for one token: 6 N."""
    return 6.0 * shape.layers * shape.layer_matmul


def attention_flops(shape: ModelShape, length: int) -> float:
    """Return the training FLOPs of the attention for one token: 12 L h S.

    h is heads x head_dim; S is the mean number of attended positions, without a causal mask.
    """
    return 12.0 * shape.layers * shape.attention.width * shape.attention_span(length)


def training_flops(shape: ModelShape, length: int, head: Head = "lm") -> float:
    """Return the model FLOPs of training on one token in a row of `length` tokens."""
    return matmul_flops(shape) + head_flops(shape, head) + attention_flops(shape, length)


def recomputed_share(recomputation: Recomputation) -> float:
    """Return rho: the share of the forward pass that is computed twice."""
    return RECOMPUTED[recomputation]


def simple_flops(shape: ModelShape, length: int, parameters: float) -> float:
    """Return 6 P + 12 L h S for one token: P counts all parameters, embeddings too.

    Many published figures of MFU use this form.
    """
    return 6.0 * parameters + attention_flops(shape, length)


def mfu(job: TrainingJob, tokens_per_second: float, peak_flops: float) -> float:
    """Return the model FLOPs utilization at tokens per second of one device."""
    return tokens_per_second * training_flops(job.shape, job.length, job.head) / peak_flops


def hfu(job: TrainingJob, tokens_per_second: float, peak_flops: float) -> float:
    """Return the hardware FLOPs utilization: MFU x (3 + rho) / 3."""
    rho = recomputed_share(job.recomputation)
    return mfu(job, tokens_per_second, peak_flops) * (1 + rho * FORWARD_SHARE)
