"""One device's peak training memory, by part, in bytes.

Sources: Rajbhandari et al., 2020 (ZeRO) for the states; Korthikanti et al., 2022, for the
activations: 34 h + 5 a S bytes per token and layer in bf16, where fused attention does not store
the 5 a S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from regauge.planner import intervals
from regauge.planner.calibration import MemoryConstants
from regauge.planner.flops import MASKED_FRACTION

if TYPE_CHECKING:
    from regauge.planner.training_job import Estimate, TrainingJob
    from regauge.training.strategies import Shards

Verdict = Literal["fits", "uncertain", "does not fit"]
STATE_BYTES = {
    "fp32": (4.0, 4.0, 0.0),
    "tf32": (4.0, 4.0, 0.0),
    "autocast": (4.0, 4.0, 0.0),
    "bf16-master": (2.0, 2.0, 4.0),
    "pure": (2.0, 2.0, 0.0),
    "fp8": (4.0, 4.0, 0.0),
    "nf4": (0.55, 2.0, 0.0),
}
UPDATE_BYTES = {
    "fp32": 4.0,
    "tf32": 4.0,
    "autocast": 4.0,
    "bf16-master": 8.0,
    "pure": 2.0,
    "fp8": 4.0,
    "nf4": 2.0,
}
"""Bytes per parameter during the update: a copy, and a fp32 gradient for a master copy."""
MOMENT_BYTES = {"adamw": 8.0, "sgd": 4.0, "8bit": 2.0}
"""Moment bytes per parameter. bf16 weights without a master copy halve all but 8 bits."""
LOGIT_BYTES = {"eager": 10.0, "fused": 4.0, "chunked": 1.0}
"""Bytes per logit: bf16 logits, fp32 copy and fp32 gradient; fused; in chunks."""
SELECTIVE_SHARE = 0.37
"""Share of the activations stored by selective recomputation."""
CERTAIN = 2.0
"""Standard deviations beyond which a verdict is certain: 1 in 40 is wrong."""
HALF_BYTES = 2.0
"""Bytes per value in a half precision."""
EAGER_NORM = 16
"""Bytes of h stored in fp32 by a layer's two RMS norms, if nothing fuses them."""
GATHERED_LAYERS = 2
"""Layers that FSDP holds whole at once: the current one and the next."""


@dataclass(frozen=True)
class MemoryParts:
    """One device's bytes by part; their sum is the peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    working_set: float
    """Layers gathered by FSDP, or weight casts."""
    context: float
    """Libraries, kernels and communication buffers."""
    fragmentation: float
    """Memory that the allocator reserves but cannot use."""

    @property
    def total(self) -> float:
        """Peak in bytes."""
        return math.fsum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class MemoryPlan:
    parts: MemoryParts
    total: Estimate
    capacity: float
    verdict: Verdict


def count_shards(job: TrainingJob, devices: int) -> Shards:
    """Return how many devices share the states under the strategy."""
    return job.strategy.count_shards(_count_copies(job, devices))


def _count_copies(job: TrainingJob, devices: int) -> int:
    return max(devices // (job.parallelism.tensor * job.parallelism.pipeline), 1)


def plan_parts(job: TrainingJob, devices: int, constants: MemoryConstants) -> MemoryParts:
    """Return one device's bytes by part."""
    shards = count_shards(job, devices)
    weights, gradients, optimizer = state_bytes(job, devices)
    activations, logits = _activation_and_logit_bytes(job, constants.activation_scale)
    working_set = _working_set(job, shards.weights)
    updated = _local_parameters(job) * job.trained_fraction / shards.optimizer
    update = UPDATE_BYTES[job.precision] * updated  # it follows the activations
    working_set = max(working_set, update - activations - logits)
    used = weights + gradients + optimizer + activations + logits + working_set
    return MemoryParts(
        weights,
        gradients,
        optimizer,
        activations,
        logits,
        working_set,
        constants.context_bytes,
        used * (constants.fragmentation - 1),
    )


def judge(total: Estimate, capacity: float) -> Verdict:
    """Return whether the memory fits; certain only beyond `CERTAIN` standard deviations.

    A wrong "fits" ends a run, and a wrong "does not fit" buys a larger machine.
    """
    width = (total.p90 / total.p50) ** (CERTAIN / intervals.NORMAL_P90)
    if total.p50 * width <= capacity:
        return "fits"
    return "does not fit" if total.p50 / width > capacity else "uncertain"


def _local_parameters(job: TrainingJob) -> float:
    """Return one device's parameters before sharding.

    The first or last pipeline stage has the most: its layers, and one embedding matrix.
    """
    shape, parallel = job.shape, job.parallelism
    total = shape.parameters(job.head)
    if parallel.pipeline == 1:
        return total / parallel.tensor
    layers = -(-shape.layers // parallel.pipeline) * shape.layer_parameters
    return (layers + shape.embedding_parameters) / parallel.tensor


def state_bytes(job: TrainingJob, devices: int) -> tuple[float, float, float]:
    """Return the bytes for weights, gradients and optimizer, with its master weights.

    They are exact for a Regauge run. Other software stores what its precision needs.
    """
    if job.weights is not None:
        copies = _count_copies(job, devices)
        states = job.weights.measure(job.strategy, copies, job.precision)
        return states.weights, states.gradients, states.master_weights + states.optimizer_state
    shards = count_shards(job, devices)
    parameters = _local_parameters(job)
    weight, gradient, master = STATE_BYTES[job.precision]
    gradient = 4.0 if job.has_fp32_gradients else gradient
    is_half = job.precision in ("pure", "nf4") and job.optimizer != "8bit"
    moments = MOMENT_BYTES[job.optimizer] * (0.5 if is_half else 1.0)
    trained = parameters * job.trained_fraction
    weight_bytes = weight * parameters
    if job.precision == "nf4":  # embeddings stay in bf16
        weight_bytes += (
            (HALF_BYTES - weight) * job.shape.embedding_parameters / job.parallelism.tensor
        )
    return (
        weight_bytes / shards.weights,
        gradient * trained / shards.gradients,
        (moments + master) * trained / shards.optimizer,
    )


def layer_activation_bytes(job: TrainingJob) -> float:
    """Return the bytes that one layer stores per micro-batch without recomputation."""
    shape, attention = job.shape, job.shape.attention
    tokens = job.tokens_per_pass / job.parallelism.context
    width, kv_width = attention.width, 2 * attention.kv_width
    if shape.is_gated:
        per_token = 4 * shape.hidden + 2 * (width + kv_width) + 6 * shape.hidden + 8 * shape.ffn
        per_token += 0 if job.has_fused_norms else EAGER_NORM * shape.hidden
    else:
        per_token = 16 * shape.hidden + 4 * shape.ffn + (2 * shape.hidden if job.dropout else 0)
    scores = 4.0 * attention.heads
    if not job.has_fused_attention:
        scores = (5 if job.dropout else 4) * attention.heads * shape.attention_span(job.length)
    scale = value_bytes(job) / HALF_BYTES
    return (per_token + scores) * tokens * scale / job.parallelism.tensor


def _activation_and_logit_bytes(job: TrainingJob, scale: float) -> tuple[float, float]:
    """Return activation and logit bytes, on the stage that has the most.

    The first stage in a pipeline of p holds up to p micro-batches, and the last one the logits.
    """
    in_flight = min(job.parallelism.pipeline, max(job.accumulation, 1))
    first_stage = _activation_bytes(job, in_flight) * scale
    last_stage, logits = _activation_bytes(job, 1) * scale, logit_bytes(job)
    if job.parallelism.pipeline > 1 and first_stage > last_stage + logits:
        return first_stage, 0.0
    return last_stage, logits


def _activation_bytes(job: TrainingJob, in_flight: int) -> float:
    """Return the bytes that a device's layers store for some micro-batches."""
    shape, parallel = job.shape, job.parallelism
    layer = layer_activation_bytes(job)
    scale = value_bytes(job) / HALF_BYTES
    tokens = job.tokens_per_pass / parallel.context
    inputs = 2 * shape.hidden * tokens * scale
    inputs /= parallel.tensor if parallel.has_sequence_parallelism else 1
    layers = -(-shape.layers // parallel.pipeline)
    if job.recomputation == "full":
        return inputs * layers * in_flight + layer
    share = SELECTIVE_SHARE if job.recomputation == "selective" else 1.0
    return layer * layers * in_flight * share + inputs


def logit_bytes(job: TrainingJob) -> float:
    """Return the bytes for logits and their gradients."""
    if job.head == "none":
        return 0.0
    positions = MASKED_FRACTION if job.head == "masked-lm" else 1.0
    tokens = job.tokens_per_pass / job.parallelism.context * positions
    return job.shape.vocab * tokens * LOGIT_BYTES[job.logits] / job.parallelism.tensor


def value_bytes(job: TrainingJob) -> float:
    """Return the bytes per activation, and per weight or gradient that processes send."""
    return 4.0 if job.precision in ("fp32", "tf32") else HALF_BYTES


def _working_set(job: TrainingJob, shards: int) -> float:
    """Return the bytes held only for a moment.

    FSDP gathers two layers and holds two layers' gradients, or the whole embedding. Under a
    pipeline it holds a stage's weights and their fp32 gradients. Autocast in other software keeps a
    bf16 copy of the weights.
    """
    shape, gather_unit, whole_bytes = job.shape, job.strategy.gather_unit, value_bytes(job)
    unit = max(shape.layer_parameters, shape.embedding_parameters / GATHERED_LAYERS)
    if gather_unit != "none" and shards > 1:
        if job.parallelism.pipeline > 1:  # gathered once for all microbatches of a step
            return (whole_bytes + 4.0 * job.trained_fraction) * _local_parameters(job)
        gradient = STATE_BYTES[job.precision][1] if job.trained_fraction == 1 else 0.0
        weights = GATHERED_LAYERS * whole_bytes
        if job.precision == "nf4":  # gathered in 4 bits, and one layer at a time restored
            weights = GATHERED_LAYERS * STATE_BYTES["nf4"][0] + whole_bytes
        if gather_unit == "model":
            whole = whole_bytes * _local_parameters(job)
            return whole + unit * GATHERED_LAYERS * gradient / job.parallelism.tensor
        return unit * (weights + GATHERED_LAYERS * gradient) / job.parallelism.tensor
    if job.weights is None and job.precision in ("autocast", "fp8"):
        return 2.0 * _local_parameters(job)
    return 0.0
