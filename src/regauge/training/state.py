"""What training changes on this process, and what a checkpoint stores of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from regauge.training import optimizer as optimizers

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from regauge.models.init_weights import InitialWeights
    from regauge.training.gradients import LossScale
    from regauge.training.guards import Guard
    from regauge.training.optimizer import LRSchedule
    from regauge.training.strategies import ShardedModel

WEIGHT_PREFIX, MOMENT_PREFIX = "model.", "optimizer."


@dataclass(frozen=True)
class Improvement:
    """Last improvement of the metric that selects the best checkpoint; see `stop.patience`."""

    value: float | None = None
    """The metric at the last improvement; None before the first evaluation."""
    num_evaluations: int = 0
    """Evaluations since then."""


@dataclass
class TrainState:
    """Model, optimizer, and how far training has come."""

    model: ShardedModel
    optimizer: torch.optim.Optimizer
    lr_schedule: LRSchedule
    loss_scale: LossScale
    guard: Guard
    initial_weights: InitialWeights
    step: int = 0
    """Finished optimizer updates."""
    attempt: int = 1
    """Attempt number, from 1."""
    resumed_step: int = 0
    """Checkpoint step that this attempt started from; 0 for none."""
    initial_metrics: dict[str, float] = field(default_factory=dict)
    best_value: float | None = None
    """Best value so far of the metric that selects the best checkpoint; None before the first."""
    best_step: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    improvement: Improvement = Improvement()

    @property
    def weights_checksum(self) -> str:
        """Sum over the bits of all weights at step 0, in hexadecimal."""
        return _checksum(self.initial_weights.bit_sums.values())

    @property
    def frozen_checksum(self) -> str:
        """The same for frozen weights; empty if all are trained."""
        sums = self.initial_weights.bit_sums
        named = self.model.module.named_parameters()
        frozen = [sums[name] for name, weight in named if not weight.requires_grad]
        return _checksum(frozen) if frozen else ""

    @property
    def optimizer_steps(self) -> float:
        """The optimizer's update count; it differs from `step` after skipped steps."""
        return optimizers.step_count(self.optimizer, self.model.masters())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> tensor, for all checkpoint tensors on this process."""
        masters = self.model.masters()
        moments = optimizers.state_tensors(self.optimizer, masters)
        return {
            **{f"{WEIGHT_PREFIX}{name}": weight.detach() for name, weight in masters.items()},
            **{f"{MOMENT_PREFIX}{name}": moment for name, moment in moments.items()},
        }

    def set_optimizer_steps(self, count: float) -> None:
        optimizers.set_step_count(self.optimizer, self.model.masters(), count)


def _checksum(sums: Iterable[int]) -> str:
    return f"{sum(sums) % 2**64:016x}"
