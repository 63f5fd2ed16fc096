"""The gradients of one step: from this process's batches to sums over the global batch.

A loss is a sum with a weight. Nothing here divides: the loop does, once, by the global weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.accelerators import Accelerator
    from regauge.strategies import Prepared
    from regauge.tasks import Sums, Task

Batch = dict[str, Tensor]


class Gradients:
    """Computes a step's gradients for a task on a prepared module."""

    def __init__(
        self, task: Task, prepared: Prepared, accelerator: Accelerator, slots: int
    ) -> None:
        self._task = task
        self._prepared = prepared
        self._slots = slots
        self._mark = accelerator.end_microbatch

    def of(self, batches: list[Batch], scale: Tensor) -> Tensor:
        """Add the gradients of a global batch times scale; return [loss sum, weight] of all."""
        self._prepared.module.train()
        return self._coupled(batches, scale) if self._task.coupled else self._alone(batches, scale)

    def _alone(self, batches: list[Batch], scale: Tensor) -> Tensor:
        total = torch.zeros(2, device=scale.device)
        for number, batch in enumerate(batches, start=1):
            with self._prepared.accumulating(last=number == len(batches)):
                loss, weight = self._task.loss(self._prepared.module(batch), batch)
                (loss * scale).backward()
            total += torch.stack([loss.detach().float(), weight.float()])
            self._mark()
        return summed(total)

    def _coupled(self, batches: list[Batch], scale: Tensor) -> Tensor:
        """Compute every output, then the loss over all of them, then the gradients.

        Where only one graph may be alive, outputs are computed without one first and again for
        their gradients (gradient caching, Gao et al., 2021); the result is the same.
        """
        module = self._prepared.module
        with torch.set_grad_enabled(not self._prepared.recomputes):
            outputs = [self._marked(module(batch)) for batch in batches]
        vectors = [output["vectors"].detach() for output in outputs]
        everything = assembled(vectors, batches, self._slots)
        leaf = everything["vectors"].requires_grad_()
        loss, weight = self._task.loss({"vectors": leaf}, everything)
        (slope,) = torch.autograd.grad(loss * scale, leaf)
        for number, (batch, output) in enumerate(zip(batches, outputs, strict=True), start=1):
            with self._prepared.accumulating(last=number == len(batches)):
                kept = module(batch) if self._prepared.recomputes else output
                share = slope[batch["slots"]] * batch["real"][:, None]
                kept["vectors"].backward(share)
            self._mark()
        return torch.stack([loss.detach().float(), weight.float()])

    def _marked(self, output: Batch) -> Batch:
        self._mark()
        return output


def assembled(vectors: list[Tensor], batches: list[Batch], slots: int) -> Batch:
    """Return the vectors of all processes in the order of their slots, on every process.

    [slots, width], and `real` [slots], 0 where a slot holds no row. Each slot is filled by one
    process and zero on the others, so that the sum over processes is exact.
    """
    first = vectors[0]
    buffer = torch.zeros(slots, first.shape[1] + 1, device=first.device)
    for rows, batch in zip(vectors, batches, strict=True):
        real = batch["real"][:, None]
        buffer.index_add_(0, batch["slots"], torch.cat([rows * real, real], 1))
    buffer = summed(buffer)
    return {"vectors": buffer[:, :-1].contiguous(), "real": buffer[:, -1].contiguous()}


def summed(value: Tensor) -> Tensor:
    """Return a tensor summed over all processes."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


def score(task: Task, prepared: Prepared, batches: Iterable[Batch], slots: int) -> dict[str, float]:
    """Return the held-out metrics over this process's batches and all others', on each of them.

    The one evaluation path: exact sums over all rows, each row once, means taken at the end.
    `slots` is the number of places that the batches of all processes fill.
    """
    prepared.module.eval()
    tallied: list[Sums] = []
    vectors: list[Tensor] = []
    places: list[Batch] = []
    with torch.no_grad():
        for batch in batches:
            output = prepared.module(batch)
            if task.coupled:
                vectors.append(output["vectors"])
                places.append({name: batch[name] for name in ("slots", "real")})
            else:
                tallied.append(task.tally(output, batch))
        if task.coupled:
            everything = assembled(vectors, places, slots)
            return _means(task.tally(everything, everything).items())
        names = tallied[0]
        totals = {name: _total([sums[name] for sums in tallied]) for name in names}
    return _means(totals.items())


def _total(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return (sum, weight) of pairs over all batches of all processes."""
    rows = torch.stack([torch.stack([top, below]).float() for top, below in pairs])
    total = summed(rows.double().sum(0).float())
    return total[0], total[1]


def _means(totals: Iterable[tuple[str, tuple[Tensor, Tensor]]]) -> dict[str, float]:
    return {name: float(top) / max(float(weight), 1e-9) for name, (top, weight) in totals}
