"""A whole model on every process: fp32 masters, and gradients summed in fp32 buckets.

Serves `single`, `ddp` and `zero1`. The layout of the buckets depends on the order of the
parameters alone and is fixed before the first step, so that a resumed run sums in the same order
(torch's DDP rebuilds its buckets after the first backward, which changes the last bits from three
processes on). A bucket's reduction starts as soon as its last gradient is there, always in the
same order, and overlaps with the rest of the backward pass. On a lazy device there is nothing to
overlap with by hand: gradients stay apart, and their sums are part of the graph of the step.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regauge.models.init_weights import materialize
from regauge.models.tensors import move
from regauge.strategies import MemoryEstimate
from regauge.strategies._buckets import Bucket, Flat, Loose
from regauge.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

    from regauge.strategies import ParamSpec, Site

    Owner = Callable[[str], int]

GRADIENT_BYTES = MASTER_BYTES = 4
SQUARED_AT_A_TIME = 1 << 20
"""Values whose squares are in memory at a time; torch's own norm of 34 million is 0.6 % off."""


def estimate_memory(
    weights: Mapping[str, ParamSpec], itemsize: int, owned: Container[str] | None = None
) -> MemoryEstimate:
    """Return what a process will hold that updates the weights of these names, or all."""
    trained = {name: form for name, form in weights.items() if form.trained}
    updated = [form.shape for name, form in trained.items() if owned is None or name in owned]
    apart = 0 if itemsize == MASTER_BYTES else MASTER_BYTES
    return MemoryEstimate(
        weights=itemsize * sum(math.prod(form.shape) for form in weights.values()),
        masters=apart * sum(map(math.prod, updated)),
        gradients=GRADIENT_BYTES * sum(math.prod(form.shape) for form in trained.values()),
        updated=tuple(updated),
    )


class Replica:
    """The model, its masters and its buckets."""

    recomputes = False
    gathers = False

    def __init__(
        self, module: nn.Module, site: Site, *, bucket_mib: int, owner: Owner | None = None
    ) -> None:
        if site.weights is not None:
            materialize(module, site.weights)
        move(module, site.device)
        self.module = module
        self._world = site.world
        self._overlaps = not site.lazy
        self._owner = owner
        named = dict(module.named_parameters())
        self._working = named
        self._masters = self._split_masters(named, site.compute_dtype)
        limit = bucket_mib * MIB // GRADIENT_BYTES
        self._buckets = self._lay_out(named, limit, site)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._last = True
        self._next = 0
        self._pending: list[dist.Work] = []
        self._connect(named)

    def masters(self) -> dict[str, nn.Parameter]:
        return dict(self._masters)

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        self._last = last
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.names)
        yield
        if last:
            for bucket in self._buckets:
                bucket.close()
            self._reduce_ready(force=True)
            for work in self._pending:
                work.wait()
            self._pending.clear()

    def gradient_norm(self) -> Tensor:
        own = [part for bucket in self._buckets if self._owns(bucket) for part in bucket.parts]
        pieces = [piece for part in own for piece in part.flatten().split(SQUARED_AT_A_TIME)]
        squares = [piece.square().sum(dtype=torch.float32) for piece in pieces]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=self._device())
        if self._owner is not None and self._world.size > 1:
            dist.all_reduce(total)
        return total.sqrt()

    def scale_gradients(self, factor: Tensor) -> None:
        for bucket in self._buckets:
            if self._owns(bucket):
                for part in bucket.parts:
                    part.mul_(factor)

    def replicas(self) -> list[Tensor]:
        if self._owner is not None:
            return list(self._working.values())
        return [self._masters.get(name, value) for name, value in self._working.items()]

    @torch.no_grad()
    def sync_weights(self) -> None:
        own = [name for name, master in self._masters.items() if master is not self._working[name]]
        if own:
            torch._foreach_copy_(
                [self._working[name].data for name in own], [self._masters[name] for name in own]
            )
        if self._owner is not None and self._world.size > 1:
            for bucket in self._buckets:
                self._broadcast(bucket)

    def clear_gradients(self) -> None:
        for bucket in self._buckets:
            bucket.clear()

    def memory(self) -> dict[str, int]:
        apart = [value for name, value in self._masters.items() if value is not self._working[name]]
        return {
            "weights": sum(value.nbytes for value in self._working.values()),
            "masters": sum(value.nbytes for value in apart),
            "gradients": GRADIENT_BYTES
            * sum(self._working[name].numel() for name in self._bucket_of),
        }

    def full_tensor(self, name: str) -> Tensor:
        """Return a master; where another process owns it, its owner sends it."""
        weight = self._working[name]
        if not weight.requires_grad:
            return weight.detach().float().cpu()
        if self._owner is None or self._world.size == 1:
            return self._masters[name].detach().cpu()
        owner = self._owner(name)
        mine = self._masters.get(name)
        buffer = torch.empty(weight.shape, device=weight.device) if mine is None else mine.detach()
        dist.broadcast(buffer, src=owner)
        return buffer.cpu()

    def _split_masters(
        self, named: dict[str, nn.Parameter], dtype: torch.dtype
    ) -> dict[str, nn.Parameter]:
        """Keep the fp32 weights that this process owns, and turn the working ones into dtype."""
        trained = [name for name, value in named.items() if value.requires_grad]
        owned = [name for name in trained if self._owned(name)]
        if dtype == torch.float32:
            return {name: named[name] for name in owned}
        masters = {name: nn.Parameter(named[name].detach().clone()) for name in owned}
        for parameter in named.values():
            parameter.data = parameter.data.to(dtype)
        return masters

    def _lay_out(self, named: dict[str, nn.Parameter], limit: int, site: Site) -> list[Bucket]:
        """Fill buckets in reverse order of the parameters, roughly the order of the backward."""
        groups: dict[int | None, list[list[str]]] = {}
        for name in reversed(list(named)):
            if not named[name].requires_grad:
                continue
            owner = self._owner(name) if self._owner else None
            group = groups.setdefault(owner, [[]])
            filled = sum(named[other].numel() for other in group[-1])
            if group[-1] and filled + named[name].numel() > limit:
                group.append([])
            group[-1].append(name)
        laid_out = [
            ({name: named[name].shape for name in names}, owner)
            for owner, lists in groups.items()
            for names in lists
        ]
        if site.lazy:
            return [Loose(*each) for each in laid_out]
        return [Flat(*each, site.device) for each in laid_out]

    def _connect(self, named: dict[str, nn.Parameter]) -> None:
        for name, bucket in self._bucket_of.items():
            bucket.attach(name, named[name], self._masters.get(name))
            named[name].register_post_accumulate_grad_hook(self._counted(bucket, name))

    def _counted(self, bucket: Bucket, name: str) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            bucket.add(name, parameter)
            bucket.missing -= 1
            if self._last and self._overlaps and bucket.missing == 0:
                self._reduce_ready(force=False)

        return arrived

    def _reduce_ready(self, *, force: bool) -> None:
        """Start the reductions that may start, in the order of the buckets on every process."""
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.missing > 0 and not force:
                return
            self._next += 1
            if self._world.size > 1:
                self._pending += [self._reduced(part, bucket.owner) for part in bucket.parts]

    @staticmethod
    def _reduced(part: Tensor, owner: int | None) -> dist.Work:
        if owner is None:
            work: dist.Work = dist.all_reduce(part, async_op=True)
        else:
            work = dist.reduce(part, dst=owner, async_op=True)
        return work

    def _broadcast(self, bucket: Bucket) -> None:
        """Send the owner's updated weights of a bucket to every process."""
        working = [self._working[name] for name in bucket.names]
        flat = torch.cat([weight.detach().reshape(-1) for weight in working])
        dist.broadcast(flat, src=bucket.owner)
        if bucket.owner != self._world.rank:
            sizes = [weight.numel() for weight in working]
            for weight, part in zip(working, flat.split(sizes), strict=True):
                weight.data.copy_(part.view_as(weight))

    def _owned(self, name: str) -> bool:
        return self._owner is None or self._owner(name) == self._world.rank

    def _owns(self, bucket: Bucket) -> bool:
        return bucket.owner is None or bucket.owner == self._world.rank

    def _device(self) -> torch.device:
        return next(iter(self._working.values())).device
