"""Seconds per training step, by part.

step = compute (1 + s)^log2(replicas) + exposed communication + optimizer + fixed; replicas counts
the machines that exchange gradients. compute = g T (6 N + head) / (peak e0) (1 + h0 / h) (1 + t0 /
T) + attention / (peak ea) + traffic x moved bytes / bandwidth, with the recomputed share.
exposed = max(0, communication - overlap compute) + communication / L; here L counts the embeddings,
too, in units of a layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from regauge.machines.machine_rates import find_peak
from regauge.planner import flops
from regauge.planner.memory_plan import (
    HALF_BYTES,
    MOMENT_BYTES,
    STATE_BYTES,
    count_positions,
    count_shards,
    value_bytes,
)
from regauge.planner.network import Topology, build_link
from regauge.training.strategies import GRADIENT_BYTES, UpdateTraffic

if TYPE_CHECKING:
    from regauge.machines.machine_rates import MachineRates
    from regauge.planner.calibration import PlannerConstants, StackConstants
    from regauge.planner.network import Link
    from regauge.planner.training_job import TrainingJob
    from regauge.training.strategies import Transfer

FP8_BYTES = 1.0
SCALAR_EFFICIENCY = 0.9
"""Share of the fp32 peak without matrix units (V100: Markidis et al., 2018)."""
EAGER_UPDATE = 100.0
"""Bytes per parameter moved by an update of many kernels: AdamW 80, gradient norm and scale 20."""
EAGER_NORM_TRAFFIC, EAGER_GELU_TRAFFIC = 108, 48
"""Bytes per value that an RMS norm in fp32 moves in both passes, and values for GPT-2's GELU."""
LOGIT_TRAFFIC = {"copied": 46.0, "eager": 28.0, "fused": 10.0, "chunked": 28.0, "streamed": 28.0}
"""Bytes moved per logit: casts, a copy, log softmax, and their gradients."""
INSIDE, BETWEEN = "any inside", "any between"
"""Stand-in link names for links without measurements."""
CAUSAL_SHARE = 0.5
"""Share of the attention scores left by a causal mask."""
BACKWARD_SHARE = 2 / 3
"""Share of the computation in the backward pass."""
OPTIMIZER_BANDWIDTH = 0.7
"""Memory bandwidth share achieved by the update, which reads and writes every state once."""


@dataclass(frozen=True)
class StepParts:
    """Seconds of one step by part; their sum is the step."""

    matmul: float
    attention: float
    traffic: float
    """Seconds in which operations without matrix products read and write activations."""
    bubble: float
    """Idle pipeline seconds."""
    growth: float
    """Seconds lost to stragglers, by machine count."""
    exposed: float
    """Communication seconds that the computation does not hide."""
    optimizer: float
    fixed: float

    @property
    def total(self) -> float:
        """Seconds per step."""
        return math.fsum(getattr(self, part.name) for part in fields(self))


def plan_step(
    job: TrainingJob, machine: MachineRates, count: int, calibration: PlannerConstants
) -> StepParts:
    """Return the seconds for one step on `count` machines, by part."""
    fused = job.has_fused_attention
    constants = calibration.find_stack(machine.chip, job.stack, is_fused=fused)
    matmul, attention = compute_seconds(job, machine, constants)
    traffic = traffic_seconds(job, machine, constants)
    compute = matmul + attention + traffic
    bubble = compute * (job.parallelism.pipeline - 1) / max(job.accumulation, 1)
    bubble /= job.parallelism.interleaved
    replicas = count_machines(job, machine, count)
    growth = compute * ((1 + constants.growth) ** math.log2(replicas) - 1)
    gradients, tensor = plan_communication(job, machine, count, calibration)
    hidden = constants.overlap * compute
    if job.strategy.sums_once:  # after the last pass, during its backward half
        hidden *= BACKWARD_SHARE / max(job.accumulation, 1)
    layers = max(job.shape.parameters(job.head) / job.shape.layer_parameters, 1.0)
    exposed = max(0.0, gradients - hidden) + tensor
    exposed += gradients / layers  # nothing follows the last layer's, and hides it
    return StepParts(
        matmul,
        attention,
        traffic,
        bubble,
        growth,
        exposed,
        optimizer_seconds(job, machine, count),
        constants.fixed_seconds,
    )


def count_machines(job: TrainingJob, machine: MachineRates, count: int) -> int:
    """Return how many machines exchange gradients: those sharing one model count once."""
    parallel = job.parallelism
    return max(count // max(parallel.pipeline * parallel.tensor // machine.devices, 1), 1)


def compute_seconds(
    job: TrainingJob, machine: MachineRates, constants: StackConstants
) -> tuple[float, float]:
    """Return one device's seconds per step in matrix products and in attention."""
    shape = job.shape
    tokens = job.tokens_per_pass * job.accumulation
    split = job.parallelism.devices
    again = 1 + flops.RECOMPUTED[job.recomputation] * flops.FORWARD_SHARE
    backward = 1.0 if job.trained_fraction == 1 else 2 / 3  # frozen weights need no gradient
    layers, others, attention, slower = find_rates(job, machine, constants)
    products = flops.matmul_flops(shape) * again / layers
    products += flops.head_flops(shape, job.head) / others
    scores = flops.attention_flops(shape, job.length) * again / attention
    scores *= CAUSAL_SHARE if shape.attention.is_causal else 1.0
    return products * backward * tokens * slower / split, scores * tokens / split


def find_rates(
    job: TrainingJob, machine: MachineRates, constants: StackConstants
) -> tuple[float, float, float, float]:
    """Return FLOP/s of large products in layers, in the output layer, and in attention.

    Also how much slower small products are: the sizes with half of the efficiency grow with the
    FLOPs for each byte that a product reads. Products in fp8 are for the layers alone.
    """
    precision = job.product_precision
    half = find_peak(machine, "half") or constants.reference_flops
    layers = find_peak(machine, precision) or half
    others = half if precision == "fp8" else layers
    size = FP8_BYTES if precision == "fp8" else value_bytes(job)
    intensity = layers / half * size / HALF_BYTES
    is_scalar = precision == "fp32" and layers < half  # without matrix units
    share = max(SCALAR_EFFICIENCY, constants.efficiency) if is_scalar else constants.efficiency
    attention = others * constants.attention_efficiency * share / constants.efficiency
    slower = 1 + constants.hidden_half * intensity / job.shape.hidden
    slower *= 1 + constants.token_half * intensity / job.tokens_per_pass
    return layers * share, others * share, attention, slower


def traffic_seconds(job: TrainingJob, machine: MachineRates, constants: StackConstants) -> float:
    """Return the seconds in which activations and logits are read and written, besides products.

    Norms, activation functions, dropout, residual sums and stored scores are limited by the memory.
    """
    layers = job.shape.layers / job.parallelism.pipeline
    again = 1 + flops.RECOMPUTED[job.recomputation] * flops.FORWARD_SHARE
    logits = count_positions(job) * job.shape.vocab / job.parallelism.tensor
    moved = layer_traffic(job) * layers * again + logits * LOGIT_TRAFFIC[job.logits]
    moved = moved * constants.traffic + _weight_traffic(job) / OPTIMIZER_BANDWIDTH
    return moved * max(job.accumulation, 1) / machine.memory_bandwidth


def layer_traffic(job: TrainingJob) -> float:
    """Return the bytes that one layer's kernels read and write in both passes, besides products.

    Counts of PyTorch's kernels. RMS norms, rotary embeddings and GPT-2's GELU are many kernels, if
    nothing fuses them.
    """
    shape, attention, size = job.shape, job.shape.attention, value_bytes(job)
    is_fused, width = job.has_fused_norms, attention.width
    hidden = size * (16 if is_fused else 24)  # two norms with the residual sums
    if shape.is_gated and not is_fused:
        hidden = 2 * EAGER_NORM_TRAFFIC + 12 * size
    hidden += (4 if is_fused else 8 * size + 4) * job.dropout
    rotated = (4 if is_fused else 20) * (width + attention.kv_width)
    positions = rotated if shape.is_gated else (0 if is_fused else 16) * width
    per_value = (8 if is_fused else 14) if shape.is_gated else 5
    if shape.family == "gpt2" and not is_fused:
        per_value = EAGER_GELU_TRAFFIC
    per_token = hidden * shape.hidden + size * (positions + per_value * shape.ffn)
    if not job.has_fused_attention:
        scores = size * (21 if job.dropout else 16) + (12 if job.precision == "autocast" else 0)
        per_token += scores * attention.heads * shape.attention_span(job.length)
    return per_token * job.tokens_per_pass / job.parallelism.context / job.parallelism.tensor


def _weight_traffic(job: TrainingJob) -> float:
    """Return the bytes that one pass moves for weights and gradients, besides products.

    Autocast casts fp32 weights and their gradients. Accumulation reads two gradients and writes
    one; Regauge adds to fp32 sums. fp8 writes weights twice. FSDP does all this on its shards.
    """
    if job.strategy.gather_unit != "none":
        return 0.0
    weight, gradient, _ = STATE_BYTES[job.precision]
    cast = {"autocast": 2 * (weight + HALF_BYTES), "fp8": HALF_BYTES + 2 * FP8_BYTES}
    moved = cast.get(job.precision, 0.0)
    gradient = 4.0 if job.has_fp32_gradients else gradient
    summed = 3 * gradient if job.accumulation > 1 else 0.0
    if job.weights is not None and value_bytes(job) == HALF_BYTES:  # its weights are not cast
        moved = cast["fp8"] if job.precision == "fp8" else 0.0
        summed = HALF_BYTES + 2 * GRADIENT_BYTES
    parallel = job.parallelism
    parameters = job.shape.parameters(job.head) * job.trained_fraction
    return parameters * (moved + summed) / (parallel.tensor * parallel.pipeline)


def plan_communication(
    job: TrainingJob, machine: MachineRates, count: int, calibration: PlannerConstants
) -> tuple[float, float]:
    """Return the seconds for one step's collectives, before overlap.

    These are the strategy's, and those of tensor parallelism, which nothing hides.
    """
    name = machine.name
    inside = build_link(machine.link_bandwidth, calibration.find_link(name, INSIDE))
    network = calibration.find_link(f"{name} network", BETWEEN)
    between = build_link(machine.network_bandwidth, network)
    parallel = job.parallelism
    devices = max(machine.devices // parallel.tensor, 1)
    machines = count_machines(job, machine, count)
    topology = Topology(inside, between, devices, machines)
    size = value_bytes(job) * job.shape.parameters(job.head) / (parallel.tensor * parallel.pipeline)
    trained, passes = size * job.trained_fraction, max(job.accumulation, 1)
    layers = max(job.shape.layers / parallel.pipeline, 1)
    traffic = UpdateTraffic(size, trained, passes, layers)

    def measure(transfer: Transfer) -> float:
        collective, bytes_, messages = transfer.collective, transfer.size, transfer.messages
        if (
            transfer.group == "between"
        ):  # the shards of a machine, which its network carries at once
            return between.seconds(collective, bytes_, machines)
        group = topology if transfer.group == "all" else replace(topology, machines=1)
        return transfer.times * group.seconds(collective, bytes_, messages)

    seconds = sum(map(measure, job.strategy.communication(traffic)))
    return seconds, _tensor_seconds(job, inside)


def _tensor_seconds(job: TrainingJob, inside: Link) -> float:
    """Return the seconds for tensor parallelism all-reduces: 4 per layer."""
    if job.parallelism.tensor == 1:
        return 0.0
    size = value_bytes(job) * job.shape.hidden * job.tokens_per_pass
    layers = job.shape.layers / job.parallelism.pipeline
    one = inside.seconds("all_reduce", size, job.parallelism.tensor)
    return 4 * layers * one * max(job.accumulation, 1)


def optimizer_seconds(job: TrainingJob, machine: MachineRates, count: int) -> float:
    """Return the update's seconds: every state is read and written once, if it is fused."""
    shards = count_shards(job, machine.devices * count).optimizer
    weight, gradient, master = STATE_BYTES[job.precision]
    state = 2 * (weight + MOMENT_BYTES[job.optimizer] + master) + gradient
    state = state if job.has_fused_update else EAGER_UPDATE
    parameters = job.shape.parameters(job.head) * job.trained_fraction
    parameters /= job.parallelism.tensor * job.parallelism.pipeline * shards
    return parameters * state / (machine.memory_bandwidth * OPTIMIZER_BANDWIDTH)
