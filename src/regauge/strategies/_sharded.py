"""A model whose weights, gradients and moments are spread: torch's FSDP2 (`fully_shard`).

Serves `fsdp` and `hsdp`. Masters are fp32 shards; the computation gathers them block by block in
its own type, in which weights lie that are not trained, and gradients are summed in fp32.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from regauge.models.tensors import bits, local, move, put
from regauge.strategies import MemoryEstimate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed.device_mesh import DeviceMesh

    from regauge.models.init_weights import InitialWeights
    from regauge.strategies import ParamSpec, Site

MASTER_BYTES = 4
SHARD = "shard"
"""The dimension of a mesh over which weights are spread."""


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


def estimate_memory(weights: Mapping[str, ParamSpec], shards: int, itemsize: int) -> MemoryEstimate:
    """Return what a process will hold: the first rows of each weight."""
    own = {name: _first_rows(form.shape, shards) for name, form in weights.items()}
    updated = [own[name] for name, form in weights.items() if form.trained]
    frozen = [own[name] for name, form in weights.items() if not form.trained]
    return MemoryEstimate(
        weights=MASTER_BYTES * sum(map(math.prod, updated))
        + itemsize * sum(map(math.prod, frozen)),
        masters=0,
        gradients=MASTER_BYTES * sum(map(math.prod, updated)),
        updated=tuple(updated),
    )


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
        if site.weights is None:
            move(module, site.device)
        for value in module.parameters():
            if not value.requires_grad:
                value.data = value.data.to(site.compute_dtype)
        for part in (*site.blocks, module):
            fully_shard(
                part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
            )
        if site.weights is not None:
            _fill(module, site.weights, site.device, mesh)
        self.module = module
        for unit in self._units():
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    def masters(self) -> dict[str, nn.Parameter]:
        named = self.module.named_parameters()
        return {name: value for name, value in named if value.requires_grad}

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        root = self._root()
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)
        yield
        if last:
            for value in self.masters().values():
                if value.grad is None:  # of a head whose task had no turn
                    value.grad = torch.zeros_like(value)

    def gradient_norm(self) -> Tensor:
        norm = get_total_norm(self._gradients())
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def scale_gradients(self, factor: Tensor) -> None:
        for gradient in self._gradients():
            local(gradient).mul_(factor)

    def replicas(self) -> list[Tensor]:
        return []

    def sync_weights(self) -> None:
        """Do nothing: the shards are the masters."""

    def clear_gradients(self) -> None:
        self.module.zero_grad(set_to_none=True)

    def memory(self) -> dict[str, int]:
        shards = [local(value) for value in self.module.parameters()]
        return {
            "weights": sum(value.nbytes for value in shards),
            "masters": 0,
            "gradients": sum(value.nbytes for value in shards if value.requires_grad),
        }

    def full_tensor(self, name: str) -> Tensor:
        weight = self.module.get_parameter(name).detach()
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return full.float().cpu()

    def _gradients(self) -> list[Tensor]:
        return [value.grad for value in self.module.parameters() if value.grad is not None]

    def _units(self) -> list[FSDPModule]:
        return [part for part in self.module.modules() if isinstance(part, FSDPModule)]

    def _root(self) -> FSDPModule:
        if not isinstance(self.module, FSDPModule):
            raise TypeError("fully_shard did not take the module")
        return self.module


@torch.no_grad()
def _fill(
    module: nn.Module, weights: InitialWeights, device: torch.device, mesh: DeviceMesh
) -> None:
    """Give a module its first weights, of which each process draws or reads its own rows.

    Its weights lie on the meta device, in shards; its buffers do not.
    """
    buffers = dict(module.named_buffers(remove_duplicate=False))
    module.to_empty(device=device)
    for name, buffer in buffers.items():
        put(module, name, buffer)
    names, sums = [], []
    for name, values in weights:
        weight = module.get_parameter(name).detach()
        own = values[_rows(weight)].float()
        local(weight).copy_(own)
        names.append(name)
        sums.append(bits(own))
    everywhere = torch.stack(sums).to(device)
    dist.all_reduce(everywhere, group=mesh.get_group(SHARD))
    weights.sums = dict(zip(names, everywhere.tolist(), strict=True))


def _first_rows(shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """Return the shape of the largest part of a weight; a scalar is on every process."""
    return (-(-shape[0] // shards), *shape[1:]) if shape else shape


def _rows(weight: Tensor) -> slice:
    """Return which rows of the whole weight this process keeps."""
    if not isinstance(weight, DTensor):
        return slice(None)
    (chunk,) = weight.__create_chunk_list__()
    first = int(chunk.offsets[0])
    return slice(first, first + int(chunk.sizes[0]))
