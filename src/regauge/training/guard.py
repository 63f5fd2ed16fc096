"""What must not get into the weights: gradients that are not finite, and a replica that differs.

Every process sees the norm of all gradients, so that all of them skip the same steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from regauge.errors import DeviceError, NoProgressError
from regauge.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.processes import World

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Guard:
    """Skips the updates of steps whose gradients are not finite, and counts them.

    torch's fused AdamW skips on the device, and nothing is read of it but at a line of metrics;
    other optimizers wait for the norm. A lazy device reads nothing within a step: there a loss that
    is not finite ends the run at the next line.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, limit: int, *, lazy: bool) -> None:
        self._optimizer = optimizer
        self._limit = limit
        self._lazy = lazy
        groups = optimizer.param_groups
        whole = not any(isinstance(value, DTensor) for value in groups[0]["params"])
        self._on_device = bool(groups[0].get("fused")) and whole
        self._counts: Tensor | None = None
        """[skipped since the last look, skipped in a row]."""

    def admits(self, norm: Tensor, totals: Tensor) -> tuple[bool, Tensor]:
        """Return whether to update, and a step's totals; without a finite norm they are 0."""
        if self._lazy:
            return True, totals
        finite = torch.isfinite(norm)
        bad = (~finite).float()
        if self._counts is None:
            self._counts = torch.zeros(2, device=norm.device)
        self._counts = torch.stack([self._counts[0] + bad, (self._counts[1] + 1) * bad])
        totals = torch.where(finite, totals, torch.zeros_like(totals))
        if self._on_device:
            self._optimizer.found_inf = bad  # type: ignore[attr-defined]
            return True, totals
        return bool(finite), totals

    def look(self, step: int) -> int:
        """Return how many steps were skipped since the last look, and say it.

        Raises NoProgressError where too many in a row were.
        """
        if self._counts is None:
            return 0
        skipped, in_a_row = (int(count) for count in self._counts.tolist())
        self._counts[0] = 0
        if skipped:
            logger.warning(
                "%d steps were skipped up to step %d: their gradients were not finite",
                skipped,
                step,
            )
        if in_a_row and in_a_row >= self._limit:
            raise NoProgressError(
                f"the gradients of {in_a_row} steps in a row were not finite, up to step {step}",
                "lower optimizer.learning_rate, or go on from an earlier checkpoint",
            )
        return skipped


def check_replicas(values: Iterable[Tensor], world: World, step: int) -> None:
    """Raise DeviceError where what every process should hold alike has other bits on some of them.

    From three processes on the smaller side is named.
    """
    if world.size == 1:
        return
    own = digest(values)
    if own is None:
        return
    everywhere = [torch.zeros_like(own) for _ in range(world.size)]
    dist.all_gather(everywhere, own)
    found = [int(each) for each in everywhere]
    if len(set(found)) == 1:
        return
    usual = max(set(found), key=found.count)
    others = [rank for rank, each in enumerate(found) if each != usual]
    named = f"process {', '.join(map(str, others))} differs from the others"
    if 2 * len(others) >= world.size:
        named = "which of them is wrong cannot be told"
    raise DeviceError(
        f"the processes hold other weights after step {step}: {named}",
        "the run goes on from its last checkpoint; look at that device if it comes again",
    )


def digest(values: Iterable[Tensor]) -> Tensor | None:
    """Return the sum of the bits of tensors, read as integers; None of no tensor."""
    sums = [
        value.detach().contiguous().view(INTEGERS[value.element_size()]).sum(dtype=torch.int64)
        for value in values
    ]
    return torch.stack(sums).sum() if sums else None


def flip(value: Tensor) -> None:
    """Turn one bit of a weight, as a faulty memory would."""
    first = value.detach().view(-1)[:1]
    bits = first.view(INTEGERS[value.element_size()])
    bits.bitwise_xor_(torch.ones_like(bits) << 20)
