"""Parallelism strategies: how weights are placed on processes and how gradients are reduced.

A strategy is a frozen table of settings. `Strategy.prepare` returns a `ShardedModel`, which the
training loop drives without knowing the strategy. Gradients are sums over the global batch; the
loop divides them once, by the weight of the global batch.

Each public module of the package is one choice: `single`, `ddp`, `zero1`, `fsdp` and `hsdp`.
`_replica` and `_sharded` implement `ShardedModel` for them and import torch. The package may import
`config`, `models`, `processes` and `units`. The planner asks a strategy what it stores and sends.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

from regauge.config import Choice

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor, nn

    from regauge.models.init_weights import InitialWeights
    from regauge.models.weight_shapes import ParamSpec
    from regauge.system.processes import World


BUCKET_BYTES = 25e6
"""Bytes of a message of gradients."""


@dataclass(frozen=True)
class Placement:
    """The processes, the device and the data types on which a module is placed."""

    world: World
    device: torch.device
    compute_dtype: torch.dtype
    blocks: tuple[nn.Module, ...]
    """The repeated layers of the model, outermost first; the units of sharding."""
    lazy: bool = False
    """Whether the device records operations (lazy tensors); see `Accelerator.is_lazy`."""
    weights: InitialWeights | None = None
    """Initial weights for a module on the meta device; None if the module has its weights."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of the process that holds most, in bytes, without moments and activations."""

    weights: int
    """Bytes of the parameters of the module."""
    master_weights: int
    """Bytes of fp32 master weights that are stored in addition to the parameters."""
    gradients: int
    updated_shapes: tuple[tuple[int, ...], ...]
    """Shapes of the (shards of) weights that the process updates; each has optimizer moments."""


class Shards(NamedTuple):
    """Number of processes over which the states of a model are divided; 1 for a copy on each."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1


class UpdateTraffic(NamedTuple):
    """The bytes of a model on the wire, and how often an update may send them."""

    weights: float
    """Bytes of all weights."""
    gradients: float
    """Bytes of the gradients of the trained weights."""
    passes: int
    """Forward and backward passes of one update."""
    layers: float
    """Layers of the model, which are gathered one by one."""


class Transfer(NamedTuple):
    """A collective of one update."""

    collective: Literal["all_reduce", "all_gather", "reduce_scatter"]
    size: float
    """Bytes of the whole message."""
    messages: float = 1.0
    """Equal messages that the bytes are divided into."""
    times: int = 1
    group: Literal["all", "inside", "between"] = "all"
    """All processes, those of one machine, or one process of each machine."""


class ShardedModel(Protocol):
    """A module that is placed on the processes of a run.

    All processes call each method together.
    """

    module: nn.Module
    """The module that computes the forward pass of a batch."""

    needs_recompute: bool
    """Whether only one autograd graph may be alive at a time.

    A loss over the global batch then computes the outputs twice.
    """

    has_forward_collectives: bool
    """Whether a forward pass contains collectives, so that processes wait for each other in it."""

    def masters(self) -> dict[str, nn.Parameter]:
        """Return the fp32 master weights that this process updates, by their unsharded names."""
        ...

    def backward_pass(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context around one backward pass of a step.

        Gradients accumulate on each process. After the last pass they are summed over processes.
        """
        ...

    def gradient_norm(self) -> Tensor:
        """Return the L2 norm of the summed gradients of all parameters, a scalar."""
        ...

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by a scalar."""
        ...

    def replicated_tensors(self) -> list[Tensor]:
        """Return the tensors that must be bitwise equal on all processes; empty for shards."""
        ...

    def sync_weights(self) -> None:
        """Copy the master weights to the parameters of the module, after an update or a load."""
        ...

    def clear_gradients(self) -> None:
        """Set all gradients to zero."""
        ...

    def memory(self) -> dict[str, int]:
        """Return the bytes of `weights`, `master_weights` and `gradients` on this process."""
        ...

    def full_tensor(self, name: str) -> Tensor:
        """Return one unsharded weight in fp32 on the CPU; every process gets it."""
        ...


class Strategy(Choice):
    """A parallelism strategy."""

    needs_recompute: ClassVar[bool] = False
    """The value of `ShardedModel.needs_recompute` without activation checkpointing."""
    complexity: ClassVar[int] = 9
    """Order of the strategies in a search: the simpler one of two equal options is preferred."""
    sums_once: ClassVar[bool] = False
    """Whether gradients are exchanged during the last backward pass of an update alone."""

    @property
    def gather_unit(self) -> Literal["none", "layers", "model"]:
        """Which sharded weights a process holds unsharded at a time."""
        return "none"

    def adapt(self, processes_per_machine: int) -> Strategy:
        """Return the strategy with the settings that suit a type of machine."""
        del processes_per_machine
        return self

    def count_shards(self, processes: int) -> Shards:
        """Return the number of processes over which weights, gradients and moments are divided."""
        del processes
        return Shards()

    def communication(self, traffic: UpdateTraffic) -> tuple[Transfer, ...]:
        """Return the collectives of one update; by default gradients are all-reduced once."""
        return (Transfer("all_reduce", traffic.gradients, traffic.gradients / BUCKET_BYTES),)

    def obstacle(self, world: World, optimizer: str, *, lazy: bool = False) -> str | None:
        """Return why this world, optimizer or device cannot use the strategy, or None."""
        del world, optimizer, lazy
        return None

    def estimate_memory(
        self, weights: Mapping[str, ParamSpec], processes: int, itemsize: int
    ) -> MemoryEstimate:
        """Return the memory of a model on the process that holds most.

        `itemsize` is the number of bytes of a value in the compute dtype.
        """
        raise NotImplementedError

    def prepare(self, module: nn.Module, placement: Placement) -> ShardedModel:
        """Place a module on the processes of a run.

        The module is in fp32 and equal on all processes. A module on the meta device gets the
        weights of the placement.
        """
        raise NotImplementedError
