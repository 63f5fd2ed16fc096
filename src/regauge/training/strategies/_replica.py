"""The whole model on every process: fp32 master weights, and gradients summed in fp32 buckets.

Implements `single`, `ddp` and `zero1`.

The bucket layout depends only on the parameter order. It is fixed before the first step, so a
resumed run sums in the same order. torch's DDP rebuilds its buckets after the first backward pass,
which changes the last bits with three or more processes.

A bucket's reduction starts when its last gradient is computed and overlaps with the rest of the
backward pass. Buckets are always reduced in the same order. On a lazy device gradients stay in
separate tensors, and their sums are part of the step's graph.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regauge.models.init_weights import materialize
from regauge.models.tensors import move_module
from regauge.system.units import MIB
from regauge.training.strategies import GRADIENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regauge.training.strategies import Placement

    OwnerOf = Callable[[str], int]
    from collections.abc import Mapping


class GradientBucket:
    """Several parameters' fp32 gradients, reduced and scaled together."""

    def __init__(self, shapes: Mapping[str, torch.Size], owner: int | None) -> None:
        self.names = list(shapes)
        self.owner = owner
        self.num_missing = len(shapes)

    @property
    def buffers(self) -> list[Tensor]:
        """Tensors with a step's gradients; valid between `close` and `clear`."""
        raise NotImplementedError

    def attach(self, name: str, parameter: nn.Parameter, master: nn.Parameter | None) -> None:
        """Register a parameter, and its master weight if this process owns it."""
        raise NotImplementedError

    def add(self, name: str, parameter: Tensor) -> None:
        """Add a parameter's new gradient, unless torch accumulated it in place."""
        raise NotImplementedError

    def close(self) -> None:
        """Complete a step's gradients: parameters without a gradient get zeros."""

    def clear(self) -> None:
        raise NotImplementedError


class FlatBucket(GradientBucket):
    """Gradients are views of one buffer, reduced by one collective.

    torch accumulates fp32 gradients in the views. Gradients of low-precision parameters are copied:
    a step's first one overwrites the previous step's stale view, later ones are added.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], owner: int | None, device: torch.device
    ) -> None:
        super().__init__(shapes, owner)
        sizes = [shape.numel() for shape in shapes.values()]
        self._flat = torch.zeros(sum(sizes), device=device)
        pieces = zip(shapes, self._flat.split(sizes), strict=True)
        self._views = {name: piece.view(shapes[name]) for name, piece in pieces}
        self._low_precision: set[str] = set()
        self._stale: set[str] = set()

    @property
    def buffers(self) -> list[Tensor]:
        return [self._flat]

    def attach(self, name: str, parameter: nn.Parameter, master: nn.Parameter | None) -> None:
        view = self._views[name]
        if master is not None:
            master.grad = view
        if parameter.dtype == torch.float32:
            parameter.grad = view
        else:
            self._low_precision.add(name)

    def add(self, name: str, parameter: Tensor) -> None:
        view = self._views[name]
        if parameter.grad is None or parameter.grad is view:
            return
        if name in self._stale:
            view.copy_(parameter.grad)
            self._stale.remove(name)
        else:
            view.add_(parameter.grad)
        parameter.grad = None

    def close(self) -> None:
        for name in self._stale:
            self._views[name].zero_()
        self._stale.clear()

    def clear(self) -> None:
        self._stale = set(self._low_precision)
        if len(self._low_precision) < len(self._views):
            self._flat.zero_()


class PerParameterBucket(GradientBucket):
    """One tensor per parameter, created by a step's first microbatch; for lazy devices.

    A shared buffer would need two more passes over the memory in every step.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], owner: int | None) -> None:
        super().__init__(shapes, owner)
        self._gradients: dict[str, Tensor] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._masters: dict[str, nn.Parameter] = {}

    @property
    def buffers(self) -> list[Tensor]:
        return [self._gradients[name] for name in self.names]

    def attach(self, name: str, parameter: nn.Parameter, master: nn.Parameter | None) -> None:
        self._parameters[name] = parameter
        if master is not None:
            self._masters[name] = master

    def add(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradient, total = parameter.grad.float(), self._gradients.get(name)
            self._gradients[name] = gradient if total is None else total.add_(gradient)
            parameter.grad = None

    def close(self) -> None:
        for name in self.names:
            if name not in self._gradients:
                zeros = torch.zeros_like(self._parameters[name], dtype=torch.float32)
                self._gradients[name] = zeros
        for name, master in self._masters.items():
            master.grad = self._gradients[name]

    def clear(self) -> None:
        self._gradients.clear()
        for master in self._masters.values():
            master.grad = None


NORM_CHUNK_SIZE = 1 << 20
"""Square values in chunks this long; torch's norm over 34 million values is 0.6 % off."""


class ReplicatedModel:
    """A model held completely by every process.

    `owner_of` returns the rank that owns a parameter (ZeRO-1). Without it every process updates
    every parameter.
    """

    needs_recompute = False
    has_forward_collectives = False

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        *,
        bucket_mib: int,
        owner_of: OwnerOf | None = None,
    ) -> None:
        if placement.weights is not None:
            materialize(module, placement.weights)
        move_module(module, placement.device)
        self.module = module
        self._world = placement.world
        self._overlaps = not placement.lazy
        self._owner_of = owner_of
        parameters = dict(module.named_parameters())
        self._parameters = parameters
        self._masters = self._split_masters(parameters, placement.compute_dtype)
        max_elements = bucket_mib * MIB // GRADIENT_BYTES
        self._buckets = self._build_buckets(parameters, max_elements, placement)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._is_last_backward = True
        self._next_bucket = 0
        self._pending: list[dist.Work] = []
        self._register_hooks(parameters)

    def masters(self) -> dict[str, nn.Parameter]:
        return dict(self._masters)

    @contextmanager
    def backward_pass(self, *, is_last: bool) -> Iterator[None]:
        self._is_last_backward = is_last
        self._next_bucket = 0
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.names)
        yield
        if is_last:
            for bucket in self._buckets:
                bucket.close()
            self._reduce_ready(force=True)
            for work in self._pending:
                work.wait()
            self._pending.clear()

    def gradient_norm(self) -> Tensor:
        buckets = [bucket for bucket in self._buckets if self._owns_bucket(bucket)]
        buffers = [buffer for bucket in buckets for buffer in bucket.buffers]
        chunks = [chunk for buffer in buffers for chunk in buffer.flatten().split(NORM_CHUNK_SIZE)]
        squares = [chunk.square().sum(dtype=torch.float32) for chunk in chunks]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=self._device())
        if self._owner_of is not None and self._world.size > 1:
            dist.all_reduce(total)
        return total.sqrt()

    def scale_gradients(self, factor: Tensor) -> None:
        for bucket in self._buckets:
            if self._owns_bucket(bucket):
                for buffer in bucket.buffers:
                    buffer.mul_(factor)

    def replicated_tensors(self) -> list[Tensor]:
        if self._owner_of is not None:
            return list(self._parameters.values())
        return [self._masters.get(name, value) for name, value in self._parameters.items()]

    @torch.no_grad()
    def sync_weights(self) -> None:
        masters = self._separate_masters()
        if masters:
            torch._foreach_copy_(
                [self._parameters[name].data for name in masters], list(masters.values())
            )
        if self._owner_of is not None and self._world.size > 1:
            for bucket in self._buckets:
                self._broadcast(bucket)

    def clear_gradients(self) -> None:
        for bucket in self._buckets:
            bucket.clear()

    def memory(self) -> dict[str, int]:
        return {
            "weights": sum(value.nbytes for value in self._parameters.values()),
            "master_weights": sum(value.nbytes for value in self._separate_masters().values()),
            "gradients": GRADIENT_BYTES
            * sum(self._parameters[name].numel() for name in self._bucket_of),
        }

    def full_tensor(self, name: str) -> Tensor:
        weight = self._parameters[name]
        if not weight.requires_grad:
            return weight.detach().float().cpu()
        if self._owner_of is None or self._world.size == 1:
            return self._masters[name].detach().cpu()
        owner = self._owner_of(name)
        master = self._masters.get(name)
        if master is None:
            buffer = torch.empty(weight.shape, device=weight.device)
        else:
            buffer = master.detach()
        dist.broadcast(buffer, src=owner)
        return buffer.cpu()

    def _separate_masters(self) -> dict[str, nn.Parameter]:
        """Return the master weights that are not module parameters themselves."""
        return {
            name: master
            for name, master in self._masters.items()
            if master is not self._parameters[name]
        }

    def _split_masters(
        self, parameters: dict[str, nn.Parameter], dtype: torch.dtype
    ) -> dict[str, nn.Parameter]:
        """Copy this process's own parameters in fp32; cast all parameters to `dtype`."""
        trained = [name for name, value in parameters.items() if value.requires_grad]
        owned = [name for name in trained if self._owns_parameter(name)]
        if dtype == torch.float32:
            return {name: parameters[name] for name in owned}
        masters = {name: nn.Parameter(parameters[name].detach().clone()) for name in owned}
        for parameter in parameters.values():
            parameter.data = parameter.data.to(dtype)
        return masters

    def _build_buckets(
        self, parameters: dict[str, nn.Parameter], max_elements: int, placement: Placement
    ) -> list[GradientBucket]:
        """Fill buckets in reverse parameter order, roughly the order of the backward pass.

        A bucket holds at most `max_elements` elements, or one parameter.
        """
        groups: dict[int | None, list[list[str]]] = {}
        for name in reversed(list(parameters)):
            if not parameters[name].requires_grad:
                continue
            owner = self._owner_of(name) if self._owner_of else None
            group = groups.setdefault(owner, [[]])
            num_elements = sum(parameters[member].numel() for member in group[-1])
            if group[-1] and num_elements + parameters[name].numel() > max_elements:
                group.append([])
            group[-1].append(name)
        layout = [
            ({name: parameters[name].shape for name in names}, owner)
            for owner, group in groups.items()
            for names in group
        ]
        if placement.lazy:
            return [PerParameterBucket(shapes, owner) for shapes, owner in layout]
        return [FlatBucket(shapes, owner, placement.device) for shapes, owner in layout]

    def _register_hooks(self, parameters: dict[str, nn.Parameter]) -> None:
        for name, bucket in self._bucket_of.items():
            parameter = parameters[name]
            bucket.attach(name, parameter, self._masters.get(name))
            parameter.register_post_accumulate_grad_hook(self._build_gradient_hook(bucket, name))

    def _build_gradient_hook(self, bucket: GradientBucket, name: str) -> Callable[[Tensor], None]:
        def on_gradient(parameter: Tensor) -> None:
            bucket.add(name, parameter)
            bucket.num_missing -= 1
            if self._is_last_backward and self._overlaps and bucket.num_missing == 0:
                self._reduce_ready(force=False)

        return on_gradient

    def _reduce_ready(self, *, force: bool) -> None:
        """Start reducing complete buckets, in the same order on every process.

        `force` also reduces buckets with missing gradients.
        """
        while self._next_bucket < len(self._buckets):
            bucket = self._buckets[self._next_bucket]
            if bucket.num_missing > 0 and not force:
                return
            self._next_bucket += 1
            if self._world.size > 1:
                self._pending += [
                    self._start_reduction(buffer, bucket.owner) for buffer in bucket.buffers
                ]

    @staticmethod
    def _start_reduction(buffer: Tensor, owner: int | None) -> dist.Work:
        if owner is None:
            work: dist.Work = dist.all_reduce(buffer, async_op=True)
        else:
            work = dist.reduce(buffer, dst=owner, async_op=True)
        return work

    def _broadcast(self, bucket: GradientBucket) -> None:
        weights = [self._parameters[name] for name in bucket.names]
        flat = torch.cat([weight.detach().reshape(-1) for weight in weights])
        dist.broadcast(flat, src=bucket.owner)
        if bucket.owner != self._world.rank:
            sizes = [weight.numel() for weight in weights]
            for weight, values in zip(weights, flat.split(sizes), strict=True):
                weight.data.copy_(values.view_as(weight))

    def _owns_parameter(self, name: str) -> bool:
        return self._owner_of is None or self._owner_of(name) == self._world.rank

    def _owns_bucket(self, bucket: GradientBucket) -> bool:
        return bucket.owner is None or bucket.owner == self._world.rank

    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device
