"""Parallelism strategies: how to place weights on processes and reduce gradients.

A strategy is a frozen settings table. `Strategy.prepare` returns a `ShardedModel`, which the
training loop drives without knowing the strategy. Gradients are sums over the global batch; the
loop divides them once, by the global batch's weight.

Each public module of the package is one choice: `single`, `ddp`, `zero1`, `fsdp` and `hsdp`.
`_replica` and `_sharded` implement `ShardedModel` for them and import torch. The package may import
`config`, `models`, `processes` and `units`. The planner asks a strategy what it stores and sends.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

from regauge.config import Choice

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    import torch
    from torch import Tensor, nn

    from regauge.models.init_weights import InitialWeights
    from regauge.models.weight_shapes import ParamSpec
    from regauge.system.processes import World


BUCKET_BYTES = 25e6
"""Bytes per gradient message."""
GRADIENT_BYTES = MASTER_BYTES = 4


@dataclass(frozen=True)
class Placement:
    """Processes, device and data types for placing a module."""

    world: World
    device: torch.device
    compute_dtype: torch.dtype
    blocks: tuple[nn.Module, ...]
    """The model's repeated layers, outermost first; the sharding units."""
    lazy: bool = False
    """Whether the device records operations (lazy tensors); see `Accelerator.is_lazy`."""
    weights: InitialWeights | None = None
    """Initial weights for a module on the meta device; None if the module has its weights."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the process that holds most, without moments and activations."""

    weights: int
    """Module parameters."""
    master_weights: int
    """fp32 master weights stored in addition to the parameters."""
    gradients: int
    updated_shapes: tuple[tuple[int, ...], ...]
    """Shapes of the weights (or shards) that the process updates; each has optimizer moments."""


class Shards(NamedTuple):
    """How many processes share a model's states; 1 for a copy on each."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1


class UpdateTraffic(NamedTuple):
    """Model bytes on the wire, and how often an update may send them."""

    weights: float
    gradients: float
    """Gradient bytes of the trained weights."""
    passes: int
    """Forward and backward passes per update."""
    layers: float
    """Model layers, which are gathered one by one."""


class Transfer(NamedTuple):
    """A collective in an update."""

    collective: Literal["all_reduce", "all_gather", "reduce_scatter"]
    size: float
    """Bytes in the whole message."""
    messages: float = 1.0
    """Equal messages that carry the bytes."""
    times: int = 1
    group: Literal["all", "inside", "between"] = "all"
    """All processes, those on one machine, or one process per machine."""


class ShardedModel(Protocol):
    """A module placed on the run's processes.

    All processes call each method together.
    """

    module: nn.Module

    needs_recompute: bool
    """Whether only one autograd graph may be alive at a time.

    A loss over the global batch then computes the outputs twice.
    """

    has_forward_collectives: bool
    """Whether processes wait for each other in a forward pass, in collectives."""

    def masters(self) -> dict[str, nn.Parameter]:
        """Unsharded name -> fp32 master weight updated by this process."""
        ...

    def backward_pass(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for one backward pass in a step.

        Gradients accumulate on each process. After the last pass they are summed over processes.
        """
        ...

    def gradient_norm(self) -> Tensor:
        """Return the L2 norm of all summed gradients, a scalar."""
        ...

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by a scalar."""
        ...

    def replicated_tensors(self) -> list[Tensor]:
        """Return the tensors that must be bitwise equal on all processes; empty for shards."""
        ...

    def sync_weights(self) -> None:
        """Copy the master weights to the module's parameters, after an update or a load."""
        ...

    def clear_gradients(self) -> None:
        """Set all gradients to zero."""
        ...

    def memory(self) -> dict[str, int]:
        """Return this process's bytes for `weights`, `master_weights` and `gradients`."""
        ...

    def full_tensor(self, name: str) -> Tensor:
        """Return one unsharded weight in fp32 on the CPU, on every process."""
        ...


class Strategy(Choice):
    """A parallelism strategy."""

    needs_recompute: ClassVar[bool] = False
    """`ShardedModel.needs_recompute` without activation checkpointing."""
    complexity: ClassVar[int] = 9
    """Search order: of two equal strategies, the simpler one is preferred."""
    sums_once: ClassVar[bool] = False
    """Whether gradients are exchanged only during an update's last backward pass."""

    @property
    def gather_unit(self) -> Literal["none", "layers", "model"]:
        """Which sharded weights a process holds unsharded at a time."""
        return "none"

    def adapt(self, processes_per_machine: int) -> Strategy:
        """Return the strategy with settings for a machine type."""
        del processes_per_machine
        return self

    def count_shards(self, processes: int) -> Shards:
        """Return how many processes share weights, gradients and moments."""
        del processes
        return Shards()

    def communication(self, traffic: UpdateTraffic) -> tuple[Transfer, ...]:
        """Return an update's collectives; by default gradients are all-reduced once."""
        return (Transfer("all_reduce", traffic.gradients, traffic.gradients / BUCKET_BYTES),)

    def obstacle(self, world: World, optimizer: str, *, lazy: bool = False) -> str | None:
        """Return why this world, optimizer or device cannot use the strategy, or None."""
        del world, optimizer, lazy
        return None

    def estimate_memory(
        self, weights: Mapping[str, ParamSpec], processes: int, itemsize: int
    ) -> MemoryEstimate:
        """Estimate a model's memory on the process that holds most; by default a whole copy.

        `itemsize` is the bytes per value in the compute dtype.
        """
        del processes
        return estimate_replica(weights, itemsize)

    def prepare(self, module: nn.Module, placement: Placement) -> ShardedModel:
        """Place a module on the run's processes.

        The module is in fp32 and equal on all processes. A module on the meta device gets the
        placement's weights.
        """
        raise NotImplementedError


def list_shard_transfers(
    traffic: UpdateTraffic, group: Literal["all", "inside"] = "all"
) -> tuple[Transfer, ...]:
    """Return the collectives for sharded weights, which each pass gathers twice, layer by layer."""
    return (
        Transfer("all_gather", traffic.weights, traffic.layers, 2 * traffic.passes, group),
        Transfer("reduce_scatter", traffic.gradients, traffic.layers, traffic.passes, group),
    )


def estimate_replica(
    weights: Mapping[str, ParamSpec], itemsize: int, owned: Container[str] | None = None
) -> MemoryEstimate:
    """Estimate the memory of a process that updates the weights with these names, or all."""
    trained = {name: spec for name, spec in weights.items() if spec.requires_grad}
    updated_shapes = [
        spec.shape for name, spec in trained.items() if owned is None or name in owned
    ]
    master_bytes = 0 if itemsize == MASTER_BYTES else MASTER_BYTES
    return MemoryEstimate(
        weights=itemsize * sum(math.prod(spec.shape) for spec in weights.values()),
        master_weights=master_bytes * sum(map(math.prod, updated_shapes)),
        gradients=GRADIENT_BYTES * sum(math.prod(spec.shape) for spec in trained.values()),
        updated_shapes=tuple(updated_shapes),
    )


def estimate_shards(weights: Mapping[str, ParamSpec], shards: int, itemsize: int) -> MemoryEstimate:
    """Estimate the memory of a process that holds each weight's largest shard."""
    local_shapes = {name: _largest_shard(spec.shape, shards) for name, spec in weights.items()}
    updated = [local_shapes[name] for name, spec in weights.items() if spec.requires_grad]
    frozen = [local_shapes[name] for name, spec in weights.items() if not spec.requires_grad]
    return MemoryEstimate(
        weights=MASTER_BYTES * sum(map(math.prod, updated))
        + itemsize * sum(map(math.prod, frozen)),
        master_weights=0,
        gradients=MASTER_BYTES * sum(map(math.prod, updated)),
        updated_shapes=tuple(updated),
    )


def find_sharding_obstacle(optimizer: str, *, lazy: bool) -> str | None:
    """Return why the optimizer or the device cannot use sharded weights, or None."""
    if lazy:
        return "torch's fully_shard does not record its gathers on a lazy device"
    return "torch's Adafactor refuses sharded tensors" if optimizer == "adafactor" else None


def _largest_shard(shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """Return the shape of a weight's largest shard; a scalar is on every process."""
    return (-(-shape[0] // shards), *shape[1:]) if shape else shape
