"""Guards against bad updates: non-finite gradients, loss spikes, and replicas that differ.

Every process has the global batch's loss and the norm of all gradients, so all processes
decide equally about a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from regauge.models.tensors import bit_sum
from regauge.system.errors import DeviceError, NoProgressError, RollbackError
from regauge.system.log import logger
from regauge.training.optimizer import REHEARSAL_LR

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.system.processes import World
    from regauge.training.settings import GuardSettings


MIN_STATS_STEPS = 16
"""Steps in the running statistics before a step can be a spike."""
MIN_STEP_WEIGHT = 0.02
"""The newest step's weight in the running statistics, after 1 / 0.02 steps."""
SLACK_LOSS, SLACK_LOG_NORM = 0.1, 0.7
"""Excess over the running mean that is never a spike: 10 % of the loss, twice the norm."""
NUM_RUNNING_STATS = 5
"""Running statistics per task; see `detect_spike`."""
REMEDY = "lower optimizer.learning_rate, or resume from an earlier checkpoint"


class Guard:
    """Decides before each update whether to skip it, and counts bad steps.

    torch's fused AdamW skips an update on the device (`found_inf`): values are read only at a log
    line. Other optimizers wait for the decision. On a lazy device nothing is read within a step. A
    skipped update there has zero gradients and a vanishing learning rate, and changes only moments.
    """

    def __init__(
        self,
        settings: GuardSettings,
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
        is_sharded = any(isinstance(value, DTensor) for value in groups[0]["params"])
        self._skips_on_device = bool(groups[0].get("fused")) and not is_sharded
        self._running_stats = [torch.zeros(NUM_RUNNING_STATS)] * tasks
        self.begin()

    def begin(self) -> None:
        """Reset the counts; the running statistics stay. Both are copied to the device as data."""
        self.num_skipped = 0
        """Skipped steps known from the log lines since then."""
        self._counts = torch.zeros(5).to(self._device)
        self._running_stats = [stats.cpu().to(self._device) for stats in self._running_stats]

    def state(self) -> list[float]:
        """Return the running statistics of all tasks, concatenated, for checkpoints."""
        return [value for stats in self._running_stats for value in stats.tolist()]

    def restore(self, state: list[float]) -> None:
        by_task = torch.tensor(state).split(NUM_RUNNING_STATS)
        self._running_stats = [stats.to(self._device) for stats in by_task]

    def should_update(self, norm: Tensor, totals: Tensor, task: int = 0) -> bool:
        """Return whether to do the update.

        `norm` is the gradient norm and `totals` the global batch's [loss sum, weight]. True if the
        update is skipped on the device.
        """
        is_finite = norm.isfinite() & totals.isfinite().all()
        values = torch.stack([totals[0] / totals[1], norm.log()])
        is_spike, self._running_stats[task] = detect_spike(
            self._running_stats[task], values, self._settings.sigmas
        )
        is_bad = ~is_finite if self._settings.spike == "warn" else ~is_finite | is_spike
        self._counts = _update_counts(self._counts, ~is_finite, is_spike, is_bad)
        self._is_bad = is_bad
        if self._skips_on_device:
            self._optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
        return self._lazy or self._skips_on_device or not bool(is_bad)

    def masked_lr(self, learning_rate: float | Tensor) -> float | Tensor:
        """Return the learning rate for the update.

        On a lazy device a bad step gets a vanishing learning rate and zero gradients.
        """
        if not self._lazy:
            return learning_rate
        for group in self._optimizer.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.grad = value.grad.masked_fill(self._is_bad, 0.0)
        return torch.as_tensor(learning_rate).masked_fill(self._is_bad, REHEARSAL_LR)

    def raise_if_needed(self, step: int) -> bool:
        """Log the bad steps since the last call; return whether the last step was good.

        The caller skips a due checkpoint after a bad step, so no run rolls back into a series
        of bad steps. Raises RollbackError if the run must return to its last checkpoint, and
        NoProgressError if it must stop.
        """
        counts = (int(count) for count in self._counts.tolist())
        steps, not_finite, spikes, consecutive_skips, first_bad = counts
        self._counts = torch.tensor([0.0, 0.0, 0.0, consecutive_skips, 0.0]).to(self._device)
        problems = {
            "gradients that are not finite": (not_finite, self._settings.not_finite),
            "a spike of the loss or the gradient norm": (spikes, self._settings.spike),
        }
        first_step = step - steps + first_bad
        self.num_skipped += not_finite + (0 if self._settings.spike == "warn" else spikes)
        for problem, (count, action) in problems.items():
            if not count:
                continue
            message = f"{count} of {steps} steps had {problem}, the first was step {first_step}"
            logger.warning("%s%s", message, "" if action == "warn" else "; they were skipped")
            if action == "rollback":
                raise RollbackError(message, REMEDY)
            if action == "stop":
                raise NoProgressError(message, REMEDY)
        if consecutive_skips >= self._settings.max_consecutive_skips:
            message = f"{consecutive_skips} consecutive steps were skipped, up to step {step}"
            raise RollbackError(message, REMEDY)
        return consecutive_skips == 0


def detect_spike(running_stats: Tensor, values: Tensor, sigmas: float) -> tuple[Tensor, Tensor]:
    """Return whether a step is a spike, and the updated running statistics.

    `values` is [loss, log gradient norm]. The statistics are [steps, 2 means, 2 variances],
    exponentially weighted (West, 1979). A spike enters them clipped to the threshold, so the
    mean follows a lasting new level.
    """
    steps, mean, variance = running_stats[0], running_stats[1:3], running_stats[3:5]
    excess = values - mean
    slack = torch.stack([mean[0].abs() * SLACK_LOSS, torch.ones_like(mean[1]) * SLACK_LOG_NORM])
    threshold = variance.sqrt() * sigmas + slack
    has_stats = steps >= MIN_STATS_STEPS
    clipped = torch.where(has_stats, excess.minimum(threshold), excess)
    weight = (1 / (steps + 1)).clamp(min=MIN_STEP_WEIGHT)
    updated_stats = torch.cat(
        [
            (steps + 1)[None],
            mean + weight * clipped,
            (1 - weight) * (variance + weight * clipped**2),
        ]
    )
    is_finite = values.isfinite().all()
    is_spike = is_finite & has_stats & (excess > threshold).any()
    return is_spike, torch.where(is_finite, updated_stats, running_stats)


def _update_counts(
    counts: Tensor, is_not_finite: Tensor, is_spike: Tensor, is_bad: Tensor
) -> Tensor:
    """Count one more step.

    Counts: [steps, non-finite steps, spikes, consecutive bad steps, index of the first bad step].
    """
    steps = counts[0] + 1
    first = torch.where((is_not_finite | is_spike) & (counts[4] == 0), steps, counts[4])
    consecutive = (counts[3] + 1) * is_bad.float()
    return torch.stack([steps, counts[1] + is_not_finite, counts[2] + is_spike, consecutive, first])


def check_replicas(values: Iterable[Tensor], world: World, step: int) -> None:
    """Raise DeviceError if replicated tensors are not bitwise equal on all processes.

    With three or more processes the error names the minority.
    """
    if world.size == 1:
        return
    local_sum = replica_bit_sum(values)
    if local_sum is None:
        return
    gathered = [torch.zeros_like(local_sum) for _ in range(world.size)]
    dist.all_gather(gathered, local_sum)
    sums = [int(value) for value in gathered]
    if len(set(sums)) == 1:
        return
    majority = max(set(sums), key=sums.count)
    minority = [rank for rank, value in enumerate(sums) if value != majority]
    culprit = f"process {', '.join(map(str, minority))} differs from the others"
    if 2 * len(minority) >= world.size:
        culprit = "there is no majority"
    raise DeviceError(
        f"weights differ between processes after step {step}: {culprit}",
        "the run resumes from its last checkpoint; check that device if this happens again",
    )


def replica_bit_sum(values: Iterable[Tensor]) -> Tensor | None:
    """Sum the tensors' bits, read as integers; None without tensors."""
    sums = [bit_sum(value) for value in values]
    return torch.stack(sums).sum() if sums else None
