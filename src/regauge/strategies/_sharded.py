"""A model whose weights, gradients and moments are spread: torch's FSDP2 (`fully_shard`).

Serves `fsdp` and `hsdp`. Masters are fp32 shards; the computation gathers them block by block in
its own type, and gradients are summed in fp32.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from regauge.models.placing import move

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from regauge.strategies import Site


def mesh(site: Site, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the processes of a run as a mesh; one that is alone first becomes a group of one."""
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=site.world.rank, world_size=1)
    return init_device_mesh(site.device.type, shape, mesh_dim_names=names)


def obstacle(optimizer: str, *, lazy: bool) -> str | None:
    """Return why neither an optimizer nor a device can use shards, or None."""
    if lazy:
        return "torch's fully_shard does not record its gathers on a lazy device"
    return "torch's Adafactor refuses sharded tensors" if optimizer == "adafactor" else None


class Sharded:
    """A module under FSDP2."""

    recomputes = True
    gathers = True

    def __init__(
        self, module: nn.Module, site: Site, mesh: DeviceMesh, *, reshard_after_forward: bool
    ) -> None:
        same = site.compute_dtype == torch.float32
        policy = MixedPrecisionPolicy(
            param_dtype=None if same else site.compute_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        move(module, site.device)
        for part in (*site.blocks, module):
            fully_shard(
                part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
            )
        self.module = module
        for unit in self._units():
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    def masters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        root = self._root()
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)
        yield

    def gradient_norm(self) -> Tensor:
        norm = get_total_norm(self._gradients())
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def scale_gradients(self, factor: Tensor) -> None:
        for gradient in self._gradients():
            _local(gradient).mul_(factor)

    def replicas(self) -> list[Tensor]:
        return []

    def publish(self) -> None:
        """Do nothing: the shards are the masters."""

    def clear_gradients(self) -> None:
        self.module.zero_grad(set_to_none=True)

    def held(self) -> dict[str, int]:
        shards = [_local(value) for value in self.module.parameters()]
        return {
            "weights": sum(value.nbytes for value in shards),
            "masters": 0,
            "gradients": sum(value.nbytes for value in shards if value.requires_grad),
        }

    def whole(self, name: str) -> Tensor:
        weight = self.module.get_parameter(name).detach()
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return full.cpu()

    def _gradients(self) -> list[Tensor]:
        return [value.grad for value in self.module.parameters() if value.grad is not None]

    def _units(self) -> list[FSDPModule]:
        return [part for part in self.module.modules() if isinstance(part, FSDPModule)]

    def _root(self) -> FSDPModule:
        if not isinstance(self.module, FSDPModule):
            raise TypeError("fully_shard did not take the module")
        return self.module


def _local(value: Tensor) -> Tensor:
    """Return this process's shard of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value
