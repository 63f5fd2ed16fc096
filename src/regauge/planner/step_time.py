"""Seconds per training step, by part.

step = compute (1 + s)^log2(replicas) + exposed communication + optimizer + fixed; replicas counts
the machines that exchange gradients. compute = g T (6 N + head) / (peak e0) (1 + h0 / h) (1 + t0 /
T) + attention / (peak ea) + traffic x activation bytes / bandwidth, with the recomputed share.
exposed = max(0, communication - overlap compute) + communication / L; here L counts the embeddings,
too, in units of a layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from regauge.planner import flops
from regauge.planner.memory_plan import (
    HALF_BYTES,
    MOMENT_BYTES,
    STATE_BYTES,
    count_shards,
    layer_activation_bytes,
    logit_bytes,
    value_bytes,
)
from regauge.planner.network import Topology, link_between, link_inside
from regauge.training.strategies import UpdateTraffic

if TYPE_CHECKING:
    from regauge.machines.machine_rates import MachineRates
    from regauge.planner.calibration import PlannerConstants, StackConstants
    from regauge.planner.network import Link
    from regauge.planner.training_job import TrainingJob
    from regauge.training.strategies import Transfer

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


@dataclass(frozen=True)
class Communication:
    """Communication seconds in one step, before overlap."""

    gradients: float
    """The strategy's all-reduce, or reduce-scatter and all-gather."""
    tensor: float
    """Tensor parallelism all-reduces, which nothing hides."""

    @property
    def total(self) -> float:
        """All seconds."""
        return self.gradients + self.tensor


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
    communication = plan_communication(job, machine, count, calibration)
    hidden = constants.overlap * compute
    if job.strategy.sums_once:  # after the last pass, during its backward half
        hidden *= BACKWARD_SHARE / max(job.accumulation, 1)
    exposed = max(0.0, communication.gradients - hidden)
    exposed += communication.gradients / _layers_of_weights(job) + communication.tensor
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


def _layers_of_weights(job: TrainingJob) -> float:
    """Return the weights in units of one layer: L, and the embeddings.

    Nothing hides the last layer's communication, because it is not followed by computation.
    """
    return max(job.shape.parameters(job.head) / job.shape.layer_parameters, 1.0)


def compute_seconds(
    job: TrainingJob, machine: MachineRates, constants: StackConstants
) -> tuple[float, float]:
    """Return one device's seconds per step in matrix products and in attention."""
    shape = job.shape
    tokens = job.tokens_per_pass * job.accumulation
    split = job.parallelism.devices
    again = 1 + flops.recomputed_share(job.recomputation) * flops.FORWARD_SHARE
    backward = 1.0 if job.trained_fraction == 1 else 2 / 3  # frozen weights need no gradient
    peak = machine.peak_flops or constants.reference_flops
    speed = peak * constants.efficiency
    slower = (1 + constants.hidden_half / shape.hidden) * (
        1 + constants.token_half / job.tokens_per_pass
    )
    products = flops.matmul_flops(shape) * again + flops.head_flops(shape, job.head)
    scores = flops.attention_flops(shape, job.length) * again
    scores *= CAUSAL_SHARE if shape.attention.is_causal else 1.0
    attention_speed = peak * constants.attention_efficiency
    return (
        products * backward * tokens * slower / speed / split,
        scores * tokens / attention_speed / split,
    )


def traffic_seconds(job: TrainingJob, machine: MachineRates, constants: StackConstants) -> float:
    """Return the seconds in which activations and logits are read and written, besides products.

    Norms, activation functions, dropout, residual sums and stored scores are limited by the memory.
    """
    layers = job.shape.layers / job.parallelism.pipeline
    again = 1 + flops.recomputed_share(job.recomputation) * flops.FORWARD_SHARE
    moved = (layer_activation_bytes(job) * layers * again + logit_bytes(job)) * constants.traffic
    moved += _weight_traffic(job) / OPTIMIZER_BANDWIDTH
    return moved * max(job.accumulation, 1) / machine.memory_bandwidth


def _weight_traffic(job: TrainingJob) -> float:
    """Return the bytes that one pass moves for weights and gradients, besides products.

    Autocast reads fp32 weights, writes bf16 ones, and casts their gradients back. Accumulation
    reads two gradients and writes one. FSDP does both on its shards.
    """
    if job.strategy.gather_unit != "none":
        return 0.0
    weight, gradient, _ = STATE_BYTES[job.precision]
    cast = 2 * (weight + HALF_BYTES) if job.precision in ("autocast", "fp8") else 0.0
    gradient = 4.0 if job.has_fp32_gradients else gradient
    summed = 3 * gradient if job.accumulation > 1 else 0.0
    parallel = job.parallelism
    parameters = job.shape.parameters(job.head) * job.trained_fraction
    return parameters * (cast + summed) / (parallel.tensor * parallel.pipeline)


def plan_communication(
    job: TrainingJob, machine: MachineRates, count: int, calibration: PlannerConstants
) -> Communication:
    """Return the communication seconds for one step: the strategy's collectives."""
    inside = link_inside(machine, calibration.find_link(machine.name, INSIDE))
    between = link_between(machine, calibration.find_link(f"{machine.name} network", BETWEEN))
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
    return Communication(seconds, _tensor_seconds(job, inside))


def _tensor_seconds(job: TrainingJob, inside: Link) -> float:
    """Return the seconds for tensor parallelism all-reduces: 4 per layer."""
    if job.parallelism.tensor == 1:
        return 0.0
    size = value_bytes(job) * job.shape.hidden * job.tokens_per_pass
    layers = job.shape.layers / job.parallelism.pipeline
    one = inside.seconds("all_reduce", size, job.parallelism.tensor)
    return 4 * layers * one * max(job.accumulation, 1)


def optimizer_seconds(job: TrainingJob, machine: MachineRates, count: int) -> float:
    """Return the update's seconds: every state is read and written once."""
    shards = count_shards(job, machine.devices * count).optimizer
    weight, gradient, master = STATE_BYTES[job.precision]
    state = 2 * (weight + MOMENT_BYTES[job.optimizer] + master) + gradient
    parameters = job.shape.parameters(job.head) * job.trained_fraction
    parameters /= job.parallelism.tensor * job.parallelism.pipeline * shards
    return parameters * state / (machine.memory_bandwidth * OPTIMIZER_BANDWIDTH)
