"""How a model lies on the processes of a run, and what they tell each other.

A strategy is a frozen table of settings; `prepare` turns a module into a `Prepared` one, which the
loop drives without knowing which strategy it is. Gradients are sums over the global batch: the
loop divides once, by the weight of all of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from regauge.config import Choice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch
    from torch import Tensor, nn

    from regauge.models.init_weights import InitialWeights
    from regauge.processes import World

    BuildOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Site:
    """Where a module is prepared."""

    world: World
    device: torch.device
    compute_dtype: torch.dtype
    blocks: tuple[nn.Module, ...]
    """The model's repeated layers, outermost first."""
    lazy: bool = False
    """Whether the device only records operations; see `Accelerator.lazy`."""
    weights: InitialWeights | None = None
    """What a module on the meta device is filled with; None where it has its weights."""


class ParamSpec(NamedTuple):
    """What there is to know of a weight before it is there."""

    shape: tuple[int, ...]
    trained: bool


@dataclass(frozen=True)
class MemoryEstimate:
    """What the process that holds most will hold: bytes, and what it updates."""

    weights: int
    masters: int
    gradients: int
    updated: tuple[tuple[int, ...], ...]
    """Shapes of the parts of weights that it updates; each has moments."""


class ShardedModel(Protocol):
    """A module on its processes; every method is called by all of them together."""

    module: nn.Module
    """What computes: call it with a batch."""

    recomputes: bool
    """Whether a coupled loss must compute outputs twice, since only one graph may be alive."""

    gathers: bool
    """Whether processes wait for each other within a forward pass."""

    def masters(self) -> dict[str, nn.Parameter]:
        """Return the fp32 weights that this process updates, by their unsharded names."""
        ...

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Surround a backward pass; gradients are summed over processes after the last one."""
        ...

    def gradient_norm(self) -> Tensor:
        """Return the norm of the summed gradients of all processes, a scalar."""
        ...

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by a scalar."""
        ...

    def replicas(self) -> list[Tensor]:
        """Return what every process holds alike, to the last bit; nothing where there is none."""
        ...

    def sync_weights(self) -> None:
        """Make what computes equal to the master weights, after a step or a load."""
        ...

    def clear_gradients(self) -> None:
        """Set all gradients to zero."""
        ...

    def memory(self) -> dict[str, int]:
        """Return the bytes that this process holds of `weights`, `masters` and `gradients`."""
        ...

    def full_tensor(self, name: str) -> Tensor:
        """Return one weight, whole, in fp32, on the CPU of every process."""
        ...


class Strategy(Choice):
    """One way to spread a model."""

    recomputes: ClassVar[bool] = False
    """What `Prepared.recomputes` will be, where no block is computed again."""

    def obstacle(self, world: World, optimizer: str, *, lazy: bool = False) -> str | None:
        """Return why this world, optimizer or kind of device cannot use the strategy, or None."""
        del world, optimizer, lazy
        return None

    def estimate_memory(
        self, weights: Mapping[str, ParamSpec], processes: int, itemsize: int
    ) -> MemoryEstimate:
        """Return what a process will hold of a model; it computes in values of so many bytes."""
        raise NotImplementedError

    def prepare(self, module: nn.Module, site: Site) -> ShardedModel:
        """Place a module, fp32 and equal on all processes, and return it prepared.

        One that lies on the meta device gets the site's weights.
        """
        raise NotImplementedError
