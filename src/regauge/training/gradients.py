"""Computes one step's gradients: from a process's batches to sums over the global batch.

A loss is a weighted sum and its weight. Gradients are sums as well; `optimizer_step` divides them
once, by the global batch's weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from regauge.models.multitask import set_active_task
from regauge.system.errors import NoProgressError
from regauge.tasks import GATHERED_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.accelerators import Batch
    from regauge.tasks import Task
    from regauge.training.strategies import ShardedModel

    SeedMicrobatch = Callable[[int], None]

INITIAL_SCALE = 2.0**16
MIN_SCALE = 2.0**-16
"""The run fails below this loss scale."""
GROWTH_INTERVAL_STEPS = 2000
"""Finite steps after which the loss scale doubles."""


class GradientComputer:
    """Computes a task's gradients on a model placed on the run's processes.

    `end_microbatch` is called after each microbatch, `before_collective` before this process may
    wait for others. `num_slots` is the number of sequences in the global batch, padding included.
    `task_name` selects the task in a multi-task model.
    """

    def __init__(
        self,
        task: Task,
        model: ShardedModel,
        end_microbatch: Callable[[], None],
        num_slots: int,
        before_collective: Callable[[], None],
        *,
        task_name: str = "",
    ) -> None:
        self._task = task
        self._model = model
        self._num_slots = num_slots
        self._end_microbatch = end_microbatch
        self._before_collective = before_collective
        self._task_name = task_name

    def accumulate_gradients(
        self,
        batches: list[Batch],
        loss_scale: Tensor,
        seed_microbatch: SeedMicrobatch | None = None,
    ) -> Tensor:
        """Accumulate gradients over a global batch; return its [loss sum, weight].

        `loss_scale` multiplies the loss sum, and with it the gradients. `seed_microbatch`, called
        with the number of each microbatch, seeds torch's generators if a module draws from them.
        """
        set_active_task(self._model.module, self._task_name)
        self._model.module.train()
        if self._task.needs_global_batch:
            return self._accumulate_global_batch(batches, loss_scale, seed_microbatch)
        return self._accumulate_microbatches(batches, loss_scale, seed_microbatch)

    def _accumulate_microbatches(
        self, batches: list[Batch], loss_scale: Tensor, seed_microbatch: SeedMicrobatch | None
    ) -> Tensor:
        totals = []
        for index, batch in enumerate(batches, start=1):
            with self._model.backward_pass(is_last=index == len(batches)):
                outputs = self._compute_outputs(batch, index, seed_microbatch)
                loss, weight = self._task.loss(outputs, batch)
                (loss * loss_scale).backward()
            totals.append(torch.stack([loss.detach().float(), weight.float()]))
            self._end_microbatch()
        return all_reduce_sum(torch.stack(totals).sum(0))

    def _accumulate_global_batch(
        self, batches: list[Batch], loss_scale: Tensor, seed_microbatch: SeedMicrobatch | None
    ) -> Tensor:
        """Compute the outputs of all microbatches, then one loss over them, then the gradients.

        If only one autograd graph may be alive, outputs are computed twice: first without a graph,
        then again for their gradients (gradient caching, Gao et al., 2021). The result is the same.
        """
        needs_recompute = self._model.needs_recompute
        outputs = []
        with torch.set_grad_enabled(not needs_recompute):
            for index, batch in enumerate(batches, start=1):
                outputs.append(self._compute_outputs(batch, index, seed_microbatch))
                self._end_microbatch()
        vectors = [output["vectors"].detach() for output in outputs]
        global_batch = gather_by_slot(vectors, batches, self._num_slots)
        leaf = global_batch["vectors"].requires_grad_()  # [slots, width]
        loss, weight = self._task.loss({"vectors": leaf}, global_batch)
        (gradient,) = torch.autograd.grad(loss * loss_scale, leaf)
        totals = torch.stack([loss.detach().float(), weight.float()])
        self._end_microbatch()
        for index, (batch, output) in enumerate(zip(batches, outputs, strict=True), start=1):
            with self._model.backward_pass(is_last=index == len(batches)):
                if needs_recompute:
                    output = self._compute_outputs(batch, index, seed_microbatch)  # noqa: PLW2901
                local_gradient = gradient[batch["slots"]] * batch["real"][:, None]
                output["vectors"].backward(local_gradient)
            self._end_microbatch()
        return totals

    def _compute_outputs(
        self, batch: Batch, index: int, seed_microbatch: SeedMicrobatch | None
    ) -> Batch:
        if seed_microbatch is not None:
            seed_microbatch(index)
        if self._model.has_forward_collectives:
            self._before_collective()
        outputs: Batch = self._model.module(batch)
        self._before_collective()
        return outputs


def gather_by_slot(vectors: list[Tensor], batches: list[Batch], num_slots: int) -> Batch:
    """Gather the vectors of all processes in slot order.

    Every process gets `vectors` [num_slots, width], `real` [num_slots], which is 0 for slots
    without a row, and the batches' GATHERED_COLUMNS, [num_slots, width]. One process fills a slot
    and the others add zeros, so the sum over processes is exact.
    """
    parts = [
        {"vectors": rows, **{name: batch[name] for name in GATHERED_COLUMNS if name in batch}}
        for rows, batch in zip(vectors, batches, strict=True)
    ]
    widths = [part.shape[1] for part in parts[0].values()]
    buffer = torch.zeros(num_slots, sum(widths) + 1, device=vectors[0].device)
    for part, batch in zip(parts, batches, strict=True):
        real = batch["real"][:, None]
        rows = torch.cat([*(columns * real for columns in part.values()), real], 1)
        buffer.index_add_(0, batch["slots"], rows)
    buffer = all_reduce_sum(buffer)
    columns = buffer[:, :-1].split(widths, 1)
    gathered = {name: part.contiguous() for name, part in zip(parts[0], columns, strict=True)}
    return {**gathered, "real": buffer[:, -1].contiguous()}


def all_reduce_sum(value: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place, and return it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


class LossScale:
    """Dynamic loss scaling: the fp16 loss factor, and the steps since its last change.

    Same rule as `torch.amp.GradScaler`: halve at a non-finite gradient norm, double after
    `GROWTH_INTERVAL_STEPS` finite ones.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self.value = INITIAL_SCALE if enabled else 1.0
        self._steps = 0
        self._device_value: tuple[float, torch.Tensor] | None = None

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Return the factor as a scalar on the device; it is copied only after a change."""
        if self._device_value is None or self._device_value[0] != self.value:
            self._device_value = (self.value, torch.tensor(self.value).to(device))
        return self._device_value[1]

    def should_update(self, norm: torch.Tensor) -> bool:
        """Return whether to update with gradients of this norm, and adapt the scale.

        The norm is read from the device only if loss scaling is enabled. It is the norm over all
        processes, so all decide equally. Raises NoProgressError if the scale falls below
        `MIN_SCALE`.
        """
        if not self._enabled:
            return True
        is_finite = bool(torch.isfinite(norm))
        self._steps = self._steps + 1 if is_finite else 0
        if not is_finite:
            self.value /= 2
            if self.value < MIN_SCALE:
                raise NoProgressError(
                    f"gradients are not finite at the smallest loss scale, {MIN_SCALE:.3g}",
                    "lower optimizer.learning_rate, or resume from an earlier checkpoint",
                )
        elif self._steps == GROWTH_INTERVAL_STEPS:
            self.value, self._steps = self.value * 2, 0
        return is_finite

    def state(self) -> dict[str, float]:
        return {"value": self.value, "steps": self._steps}

    def restore(self, state: dict[str, float]) -> None:
        """Resume from a checkpoint; a run without loss scaling before starts anew."""
        if self._enabled and state["value"] != 1.0:
            self.value, self._steps = state["value"], int(state["steps"])
