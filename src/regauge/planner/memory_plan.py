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
from regauge.training.strategies import GRADIENT_BYTES

if TYPE_CHECKING:
    from regauge.planner.training_job import Estimate, TrainingJob
    from regauge.training.strategies import Shards

Verdict = Literal["fits", "undecided", "does not fit"]
STATE_BYTES = dict.fromkeys(("fp32", "tf32", "autocast", "fp8"), (4.0, 4.0, 0.0)) | {
    "bf16-master": (2.0, 2.0, 4.0),
    "pure": (2.0, 2.0, 0.0),
    "nf4": (0.55, 2.0, 0.0),
}
MOMENT_BYTES = {"adamw": 8.0, "sgd": 4.0, "8bit": 2.0}
"""Moment bytes per parameter. bf16 weights without a master copy halve all but 8 bits."""
LOGIT_BYTES = {"copied": 14.0, "eager": 10.0, "fused": 4.0, "chunked": 1.0}
"""Bytes per logit: in bf16, in fp32, shifted copy, log softmax; without the copy; fused; chunks."""
CHUNK_TOKENS, CHUNK_BYTES = 1024, 12.0
"""Tokens whose logits Regauge's loss holds at a time, and bytes per logit: 2, 4, 4 and gradient."""
SELECTIVE_SHARE = 0.37
"""Share of the activations stored by selective recomputation."""
CERTAIN = 2.0
"""Standard deviations beyond which a verdict is certain: 1 in 40 is wrong."""
HALF_BYTES = 2.0
"""Bytes per value in a half precision."""
FP32_BYTES = 4.0
EAGER_NORMS, EAGER_GELU = 8, 3
"""Bytes of h for fp32 copies in unfused RMS norms; values of f in GPT-2's unfused GELU."""
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
    # The update follows the activations: a copy, and an fp32 gradient for a master copy.
    is_in_place = job.weights is not None and job.optimizer == "adamw"
    _, gradient, master = STATE_BYTES[job.precision]
    update = 0.0 if is_in_place else (max(gradient, master) + master) * updated
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
    return "does not fit" if total.p50 / width > capacity else "undecided"


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
    """Return the bytes that one layer stores per micro-batch without recomputation.

    It equals what autograd saves: inputs and outputs of norms, attention and activation function.
    """
    shape, attention, size = job.shape, job.shape.attention, value_bytes(job)
    per_token = size * (4 * shape.hidden + 2 * attention.width + 2 * attention.kv_width)
    per_token += size * (4 if shape.is_gated else 2) * shape.ffn
    if not job.has_fused_norms:
        per_token += EAGER_NORMS * shape.hidden if shape.is_gated else 0
        per_token += size * EAGER_GELU * shape.ffn if shape.family == "gpt2" else 0
    if job.dropout:  # Regauge's masks have the data type of the values
        per_token += 2 * shape.hidden * (1 if job.weights is None else size)
    scores = 4.0
    if not job.has_fused_attention:
        scores = _score_bytes(job) * shape.attention_span(job.length)
    tokens = job.tokens_per_pass / job.parallelism.context
    return (per_token + scores * attention.heads) * tokens / job.parallelism.tensor


def _score_bytes(job: TrainingJob) -> float:
    """Return the bytes stored per attention score, if a layer stores them.

    Probabilities, their cast if softmax computes in fp32, and with dropout a mask and the dropped
    values. Regauge's attention lacks dropout, and only its gated models compute softmax in fp32.
    """
    size, is_regauge = value_bytes(job), job.weights is not None
    is_fp32 = job.shape.is_gated if is_regauge else job.precision == "autocast"
    stored = FP32_BYTES + size if is_fp32 and size < FP32_BYTES else size
    if is_regauge:
        return stored
    return stored + 1 + (FP32_BYTES if is_fp32 else size) if job.dropout else max(stored, 2 * size)


def _activation_and_logit_bytes(job: TrainingJob, scale: float) -> tuple[float, float]:
    """Return activation and logit bytes, on the stage that has the most.

    The first stage in a pipeline of p holds up to p micro-batches, and the last one the logits.
    """
    in_flight = min(job.parallelism.pipeline, max(job.accumulation, 1))
    first_stage = _activation_bytes(job, in_flight) * scale
    last_stage, logits = _activation_bytes(job, 1) * scale, logit_bytes(job)
    if job.recomputation == "full":  # the loss is over when the first layer is recomputed
        logits = max(logits - layer_activation_bytes(job) * scale, 0.0)
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
    """Return the bytes for logits and their gradients.

    Regauge's loss keeps the gradients of the hidden states and of the head, and one chunk's logits.
    """
    if job.head == "none":
        return 0.0
    tokens = count_positions(job)
    if job.logits == "streamed":
        chunk = min(tokens, CHUNK_TOKENS) * job.shape.vocab * CHUNK_BYTES
        head = job.shape.logit_matmul if job.trained_fraction == 1 else 0
        return chunk + 2 * value_bytes(job) * (tokens * job.shape.hidden + head)
    return job.shape.vocab * tokens * LOGIT_BYTES[job.logits] / job.parallelism.tensor


def count_positions(job: TrainingJob) -> float:
    """Return the positions for which one device computes logits in a pass."""
    if job.head == "none":
        return 0.0
    positions = MASKED_FRACTION if job.head == "masked-lm" else 1.0
    return job.tokens_per_pass / job.parallelism.context * positions


def value_bytes(job: TrainingJob) -> float:
    """Return the bytes per activation, and per weight or gradient that processes send."""
    return 4.0 if job.precision in ("fp32", "tf32") else HALF_BYTES


def _working_set(job: TrainingJob, shards: int) -> float:
    """Return the bytes held only for a moment.

    FSDP gathers two layers and holds two layers' gradients, or the whole embedding. Under a
    pipeline it holds a stage's weights and their fp32 gradients. Regauge sums the gradients of
    several passes whole, in fp32, and shards their sum. Autocast in other software keeps a bf16
    copy of the weights.
    """
    shape, gather_unit, whole_bytes = job.shape, job.strategy.gather_unit, value_bytes(job)
    unit = max(shape.layer_parameters, shape.embedding_parameters / GATHERED_LAYERS)
    if gather_unit != "none" and shards > 1:
        if job.parallelism.pipeline > 1:  # gathered once for all microbatches of a step
            return (whole_bytes + 4.0 * job.trained_fraction) * _local_parameters(job)
        gradient = STATE_BYTES[job.precision][1] if job.trained_fraction == 1 else 0.0
        is_summed = job.weights is not None and job.accumulation > 1
        summed = GRADIENT_BYTES * _local_parameters(job) * job.trained_fraction * is_summed
        gradient *= not is_summed
        weights = GATHERED_LAYERS * whole_bytes
        if job.precision == "nf4":  # gathered in 4 bits, and one layer at a time restored
            weights = GATHERED_LAYERS * STATE_BYTES["nf4"][0] + whole_bytes
        if gather_unit == "model":
            whole = whole_bytes * _local_parameters(job)
            return summed + whole + unit * GATHERED_LAYERS * gradient / job.parallelism.tensor
        return summed + unit * (weights + GATHERED_LAYERS * gradient) / job.parallelism.tensor
    if job.weights is None and job.precision in ("autocast", "fp8"):
        return 2.0 * _local_parameters(job)
    return 0.0
