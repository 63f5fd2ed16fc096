"""A model with sharded weights, gradients and moments: torch's FSDP2 (`fully_shard`).

Implements `fsdp` and `hsdp`. Master weights are fp32 shards. The forward pass gathers them block by
block in the compute dtype; frozen weights are stored in that dtype. Gradients are summed in fp32.
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

from regauge.models.tensors import bit_sum, local_shard, move_module, set_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from regauge.models.init_weights import InitialWeights
    from regauge.training.strategies import Placement

SHARD_DIM = "shard"


def build_mesh(placement: Placement, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the processes as a mesh; a single process first gets a group of size one."""
    kind = placement.device.type
    if not dist.is_initialized():
        # By default, torch selects the backend of the machine's GPU, also for a run on the CPU.
        backend = dist.get_default_backend_for_device(kind)
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=placement.world.rank, world_size=1
        )
    return init_device_mesh(kind, shape, mesh_dim_names=names)


class FsdpModel:
    """A module sharded with FSDP2."""

    needs_recompute = True
    has_forward_collectives = True

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        mesh: DeviceMesh,
        *,
        reshard_after_forward: bool,
    ) -> None:
        is_fp32 = placement.compute_dtype == torch.float32
        policy = MixedPrecisionPolicy(
            param_dtype=None if is_fp32 else placement.compute_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        if placement.weights is None:
            move_module(module, placement.device)
        else:
            _move_buffers(module, placement.device)
        for value in module.parameters():
            if not value.requires_grad:
                value.data = value.data.to(placement.compute_dtype)
        for unit in (*placement.blocks, module):
            fully_shard(
                unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
            )
        if placement.weights is not None:
            _materialize_shards(module, placement.weights, placement.device, mesh)
        self.module = module
        for fsdp_module in self._fsdp_modules():
            fsdp_module.set_gradient_divide_factor(1.0)
            fsdp_module.set_force_sum_reduction_for_comms(True)

    def masters(self) -> dict[str, nn.Parameter]:
        parameters = self.module.named_parameters()
        return {name: value for name, value in parameters if value.requires_grad}

    @contextmanager
    def backward_pass(self, *, is_last: bool) -> Iterator[None]:
        root = self._root()
        root.set_requires_gradient_sync(is_last)
        root.set_is_last_backward(is_last)
        yield
        if is_last:
            for value in self.masters().values():
                if value.grad is None:  # the head of a task that this step does not train
                    value.grad = torch.zeros_like(value)

    def gradient_norm(self) -> Tensor:
        norm = get_total_norm(self._gradients())
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def scale_gradients(self, factor: Tensor) -> None:
        for gradient in self._gradients():
            local_shard(gradient).mul_(factor)

    def replicated_tensors(self) -> list[Tensor]:
        return []

    def sync_weights(self) -> None:
        """Do nothing: the shards are the master weights."""

    def clear_gradients(self) -> None:
        self.module.zero_grad(set_to_none=True)

    def memory(self) -> dict[str, int]:
        shards = [local_shard(value) for value in self.module.parameters()]
        return {
            "weights": sum(value.nbytes for value in shards),
            "master_weights": 0,
            "gradients": sum(value.nbytes for value in shards if value.requires_grad),
        }

    def full_tensor(self, name: str) -> Tensor:
        weight = self.module.get_parameter(name).detach()
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return full.float().cpu()

    def _gradients(self) -> list[Tensor]:
        return [value.grad for value in self.module.parameters() if value.grad is not None]

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]

    def _root(self) -> FSDPModule:
        if not isinstance(self.module, FSDPModule):
            raise TypeError("fully_shard did not wrap the module")
        return self.module


@torch.no_grad()
def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Replace buffers that have values by copies on the device.

    `fully_shard` moves them by an assignment to `data`, which out-of-tree devices refuse.
    """
    for name, buffer in list(module.named_buffers(remove_duplicate=False)):
        if not buffer.is_meta:
            set_tensor(module, name, buffer.to(device))


def _materialize_shards(
    module: nn.Module, weights: InitialWeights, device: torch.device, mesh: DeviceMesh
) -> None:
    """Set a sharded module's initial weights; each process draws or reads its local rows.

    The module's weights are shards on the meta device. Its buffers are not on the meta device.
    """
    buffers = dict(module.named_buffers(remove_duplicate=False))
    module.to_empty(device=device)
    for name, buffer in buffers.items():
        set_tensor(module, name, buffer)
    names, sums = [], []
    for name, values in weights:
        weight = module.get_parameter(name).detach()
        shard = values[_local_rows(weight)].float()
        local_shard(weight).copy_(shard)
        names.append(name)
        sums.append(bit_sum(shard))
    totals = torch.stack(sums).to(device)
    dist.all_reduce(totals, group=mesh.get_group(SHARD_DIM))
    weights.bit_sums = dict(zip(names, totals.tolist(), strict=True))


def _local_rows(weight: Tensor) -> slice:
    """Return the slice of an unsharded weight's rows on this process."""
    if not isinstance(weight, DTensor):
        return slice(None)
    (chunk,) = weight.__create_chunk_list__()
    first = int(chunk.offsets[0])
    return slice(first, first + int(chunk.sizes[0]))
