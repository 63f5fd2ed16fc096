"""What must not get into the weights: gradients that are not finite, or far above the usual.

Every process sees the loss of the global batch and the norm of all gradients, so that all of them
judge a step alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from regauge.errors import DeviceError, NoProgressError, RollBackError
from regauge.log import logger
from regauge.models.tensors import bits
from regauge.training.optimizer import REHEARSAL_RATE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.processes import World
    from regauge.training.settings import Guarding


LEARNING_STEPS = 16
"""Steps before anything counts as far above the usual."""
NEWEST_SHARE = 0.02
"""Share of the newest step in what is usual, once that is learned."""
SLACK_LOSS, SLACK_LOG_NORM = 0.1, 0.7
"""What is never far above: a tenth of the usual loss more, and twice the usual norm."""
RUNNING_STATS = 5
"""Values by which the usual is known, see `judged`."""
REMEDY = "lower optimizer.learning_rate, or go on from an earlier checkpoint"


class Guard:
    """Judges each step before its update, and counts what it has found.

    torch's fused AdamW leaves a step out on the device, and nothing is read of it but at a line of
    metrics; other optimizers wait for the verdict. On a lazy device nothing is read within a step:
    there the update is one of no gradient and a vanishing rate, which changes the moments alone.
    """

    def __init__(
        self,
        settings: Guarding,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        lazy: bool,
        tasks: int = 1,
    ) -> None:
        self._settings = settings
        self._optimizer = optimizer
        self._device = device
        self._lazy = lazy
        groups = optimizer.param_groups
        whole = not any(isinstance(value, DTensor) for value in groups[0]["params"])
        self._on_device = bool(groups[0].get("fused")) and whole
        self._usual = [torch.zeros(RUNNING_STATS)] * tasks
        self.begin()

    def begin(self) -> None:
        """Start to count; what is usual stays. Both are sent to the device as data."""
        self._counts = torch.zeros(5).to(self._device)
        self._usual = [each.cpu().to(self._device) for each in self._usual]

    def state(self) -> list[float]:
        """Return what is usual of each task, one behind the other, as a checkpoint keeps it."""
        return [value for each in self._usual for value in each.tolist()]

    def restore(self, state: list[float]) -> None:
        """Go on from a checkpoint."""
        self._usual = [each.to(self._device) for each in torch.tensor(state).split(RUNNING_STATS)]

    def should_update(self, norm: Tensor, totals: Tensor, task: int = 0) -> bool:
        """Return whether to update by a step of this gradient norm and [loss sum, weight]."""
        finite = norm.isfinite() & totals.isfinite().all()
        seen = torch.stack([totals[0] / totals[1], norm.log()])
        spike, self._usual[task] = detect_spike(self._usual[task], seen, self._settings.deviations)
        bad = ~finite if self._settings.spike == "say" else ~finite | spike
        self._counts = _counted(self._counts, ~finite, spike, bad)
        self._bad = bad
        if self._on_device:
            self._optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        return self._lazy or self._on_device or not bool(bad)

    def masked_lr(self, rate: float | Tensor) -> float | Tensor:
        """Return the learning rate of the update; a lazy device's gradients are made harmless."""
        if not self._lazy:
            return rate
        for group in self._optimizer.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.grad = value.grad.masked_fill(self._bad, 0.0)
        return torch.as_tensor(rate).masked_fill(self._bad, REHEARSAL_RATE)

    def raise_if_needed(self, step: int) -> bool:
        """Say what was found since the last look, and return whether the last step was good.

        After a bad one a save waits for the next that is due, so that a run never goes back to the
        midst of them. Raises RollBackError where the run is to go back to its last checkpoint, and
        NoProgressError where it is to stop.
        """
        steps, broken, spikes, in_a_row, first = (int(count) for count in self._counts.tolist())
        self._counts = torch.tensor([0.0, 0.0, 0.0, in_a_row, 0.0]).to(self._device)
        found = {
            "gradients that are not finite": (broken, self._settings.not_finite),
            "a loss or gradients far above the usual": (spikes, self._settings.spike),
        }
        limit = self._settings.skipped_in_a_row
        for what, (count, action) in found.items():
            if not count:
                continue
            said = f"{count} of {steps} steps had {what}, the first was step {step - steps + first}"
            logger.warning("%s%s", said, "" if action == "say" else "; they were skipped")
            if action == "roll-back":
                raise RollBackError(said, REMEDY)
            if action == "stop":
                raise NoProgressError(said, REMEDY)
        if in_a_row >= limit:
            line = f"{in_a_row} steps in a row were skipped, up to step {step}"
            raise RollBackError(line, REMEDY)
        return in_a_row == 0


def detect_spike(usual: Tensor, seen: Tensor, deviations: float) -> tuple[Tensor, Tensor]:
    """Return whether a step's [loss, log of the gradient norm] is a spike, and the usual after it.

    The usual is [steps, 2 means, 2 variances], exponentially weighted (West, 1979). A spike counts
    in it as the most that would have been none, so that a new level becomes usual in time.
    """
    steps, mean, variance = usual[0], usual[1:3], usual[3:5]
    above = seen - mean
    slack = torch.stack([mean[0].abs() * SLACK_LOSS, torch.ones_like(mean[1]) * SLACK_LOG_NORM])
    room = variance.sqrt() * deviations + slack
    known = steps >= LEARNING_STEPS
    counted = torch.where(known, above.minimum(room), above)
    share = (1 / (steps + 1)).clamp(min=NEWEST_SHARE)
    after = torch.cat(
        [
            (steps + 1)[None],
            mean + share * counted,
            (1 - share) * (variance + share * counted**2),
        ]
    )
    real = seen.isfinite().all()
    return real & known & (above > room).any(), torch.where(real, after, usual)


def _counted(counts: Tensor, broken: Tensor, spike: Tensor, bad: Tensor) -> Tensor:
    """Return [steps, broken ones, spikes, bad ones in a row, the first one] after one more step."""
    steps = counts[0] + 1
    first = torch.where((broken | spike) & (counts[4] == 0), steps, counts[4])
    in_a_row = (counts[3] + 1) * bad.float()
    return torch.stack([steps, counts[1] + broken, counts[2] + spike, in_a_row, first])


def check_replicas(values: Iterable[Tensor], world: World, step: int) -> None:
    """Raise DeviceError where what every process should hold alike has other bits on some of them.

    From three processes on the smaller side is named.
    """
    if world.size == 1:
        return
    own = bit_sum(values)
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


def bit_sum(values: Iterable[Tensor]) -> Tensor | None:
    """Return the sum of the bits of tensors, read as integers; None of no tensor."""
    sums = [bits(value) for value in values]
    return torch.stack(sums).sum() if sums else None
