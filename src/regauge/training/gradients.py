"""The gradients of one step: from this process's batches to sums over the global batch.

A loss is a sum with a weight. Nothing here divides: the loop does, once, by the global weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from regauge.data.randomness import keyed
from regauge.errors import NoProgressError
from regauge.models.multitask import set_active_task

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.accelerators import Accelerator, Batch
    from regauge.strategies import ShardedModel
    from regauge.tasks import Task


FIRST_SCALE = 2.0**16
LEAST_SCALE = 2.0**-16
GROWTH_STEPS = 2000


@dataclass(frozen=True)
class DropoutSeed:
    """What the framework's own generator is keyed by, so that native dropout can be resumed."""

    accelerator: Accelerator
    seed: int
    step: int
    rank: int

    def seed_microbatch(self, microbatch: int) -> None:
        """Seed every generator of this process for a microbatch of its step."""
        word = int(keyed(self.seed, self.step, self.rank, microbatch))
        self.accelerator.seed(word >> 1)


class GradientComputer:
    """Computes a step's gradients for a task on a prepared module.

    `mark` ends a microbatch, `arrive` comes before this process may wait for others, `name` is the
    task's where there are several.
    """

    def __init__(
        self,
        task: Task,
        prepared: ShardedModel,
        mark: Callable[[], None],
        slots: int,
        arrive: Callable[[], None],
        *,
        name: str = "",
    ) -> None:
        self._task = task
        self._prepared = prepared
        self._slots = slots
        self._mark = mark
        self._arrive = arrive
        self._name = name

    def accumulate_gradients(
        self, batches: list[Batch], scale: Tensor, noise: DropoutSeed | None = None
    ) -> Tensor:
        """Add the gradients of a global batch times scale; return [loss sum, weight] of all.

        `noise` is None where nothing draws from the framework's generator.
        """
        set_active_task(self._prepared.module, self._name)
        self._prepared.module.train()
        compute = self._coupled if self._task.coupled else self._alone
        return compute(batches, scale, noise)

    def _alone(self, batches: list[Batch], scale: Tensor, noise: DropoutSeed | None) -> Tensor:
        parts = []
        for number, batch in enumerate(batches, start=1):
            with self._prepared.accumulating(last=number == len(batches)):
                loss, weight = self._task.loss(self._outputs(batch, number, noise), batch)
                (loss * scale).backward()
            parts.append(torch.stack([loss.detach().float(), weight.float()]))
            self._mark()
        return all_reduce_sum(torch.stack(parts).sum(0))

    def _coupled(self, batches: list[Batch], scale: Tensor, noise: DropoutSeed | None) -> Tensor:
        """Compute every output, then the loss over all of them, then the gradients.

        Where only one graph may be alive, outputs are computed without one first and again for
        their gradients (gradient caching, Gao et al., 2021); the result is the same.
        """
        with torch.set_grad_enabled(not self._prepared.recomputes):
            outputs = [
                self._marked(self._outputs(batch, number, noise))
                for number, batch in enumerate(batches, start=1)
            ]
        vectors = [output["vectors"].detach() for output in outputs]
        everything = gather_by_slot(vectors, batches, self._slots)
        leaf = everything["vectors"].requires_grad_()
        loss, weight = self._task.loss({"vectors": leaf}, everything)
        (slope,) = torch.autograd.grad(loss * scale, leaf)
        totals = torch.stack([loss.detach().float(), weight.float()])
        self._mark()
        for number, (batch, output) in enumerate(zip(batches, outputs, strict=True), start=1):
            with self._prepared.accumulating(last=number == len(batches)):
                again = self._prepared.recomputes
                kept = self._outputs(batch, number, noise) if again else output
                share = slope[batch["slots"]] * batch["real"][:, None]
                kept["vectors"].backward(share)
            self._mark()
        return totals

    def _outputs(self, batch: Batch, number: int, noise: DropoutSeed | None) -> Batch:
        if noise is not None:
            noise.seed_microbatch(number)
        if self._prepared.gathers:
            self._arrive()
        outputs: Batch = self._prepared.module(batch)
        self._arrive()
        return outputs

    def _marked(self, output: Batch) -> Batch:
        self._mark()
        return output


def gather_by_slot(vectors: list[Tensor], batches: list[Batch], slots: int) -> Batch:
    """Return the vectors of all processes in the order of their slots, on every process.

    [slots, width], and `real` [slots], 0 where a slot holds no row. Each slot is filled by one
    process and zero on the others, so that the sum over processes is exact.
    """
    first = vectors[0]
    buffer = torch.zeros(slots, first.shape[1] + 1, device=first.device)
    for rows, batch in zip(vectors, batches, strict=True):
        real = batch["real"][:, None]
        buffer.index_add_(0, batch["slots"], torch.cat([rows * real, real], 1))
    buffer = all_reduce_sum(buffer)
    return {"vectors": buffer[:, :-1].contiguous(), "real": buffer[:, -1].contiguous()}


def all_reduce_sum(value: Tensor) -> Tensor:
    """Return a tensor summed over all processes."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


class LossScale:
    """The factor of the loss, and the steps since it last changed."""

    def __init__(self, *, scaled: bool) -> None:
        self._scaled = scaled
        self.value = FIRST_SCALE if scaled else 1.0
        self._steps = 0
        self._sent: tuple[float, torch.Tensor] | None = None

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Return the factor as a scalar on the device, sent when it has changed."""
        if self._sent is None or self._sent[0] != self.value:
            self._sent = (self.value, torch.tensor(self.value).to(device))
        return self._sent[1]

    def accepts(self, norm: torch.Tensor) -> bool:
        """Return whether a step with this gradient norm counts, and adapt to it.

        Reads the norm from the device only where the loss is scaled. The norm is that of all
        processes, so that all of them decide alike.
        """
        if not self._scaled:
            return True
        finite = bool(torch.isfinite(norm))
        self._steps = self._steps + 1 if finite else 0
        if not finite:
            self.value /= 2
            if self.value < LEAST_SCALE:
                raise NoProgressError(
                    "the gradients are not finite, however small the loss is scaled",
                    "lower optimizer.learning_rate, or go on from an earlier checkpoint",
                )
        elif self._steps == GROWTH_STEPS:
            self.value, self._steps = self.value * 2, 0
        return finite

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {"value": self.value, "steps": self._steps}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint; a run in another precision starts with its own scale."""
        if self._scaled and state["value"] != 1.0:
            self.value, self._steps = state["value"], int(state["steps"])
