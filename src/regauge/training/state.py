"""What training changes on this process, and what a checkpoint of it holds."""

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
"""Prefixes of the names of tensors in a checkpoint."""


@dataclass(frozen=True)
class Improvement:
    """The last improvement of the metric that selects the best checkpoint; see `stop.patience`."""

    value: float | None = None
    """The metric at the last improvement; None before the first evaluation."""
    num_evaluations: int = 0
    """Number of evaluations since then."""


@dataclass
class TrainState:
    """The model, the optimizer, and how far training has come."""

    model: ShardedModel
    optimizer: torch.optim.Optimizer
    lr_schedule: LRSchedule
    loss_scale: LossScale
    guard: Guard
    initial_weights: InitialWeights
    """The weights of step 0."""
    step: int = 0
    """Number of optimizer updates that are done."""
    attempt: int = 1
    """Number of this launch of the run, from 1."""
    resumed_step: int = 0
    """The step of the checkpoint that this attempt started from; 0 for none."""
    initial_metrics: dict[str, float] = field(default_factory=dict)
    """The held-out metrics before the first step."""
    best_value: float | None = None
    """The best value of the metric that selects the best checkpoint; None before the first."""
    best_step: int | None = None
    """The step with the best value."""
    best_metrics: dict[str, float] = field(default_factory=dict)
    """The held-out metrics of that step."""
    improvement: Improvement = Improvement()
    """The last evaluation that was an improvement."""

    @property
    def weights_checksum(self) -> str:
        """The sum of the bits of all weights of step 0, in hexadecimal."""
        return _checksum(self.initial_weights.bit_sums.values())

    @property
    def frozen_checksum(self) -> str:
        """The same of the weights that are not trained; empty if all are trained."""
        sums = self.initial_weights.bit_sums
        named = self.model.module.named_parameters()
        frozen = [sums[name] for name, weight in named if not weight.requires_grad]
        return _checksum(frozen) if frozen else ""

    @property
    def optimizer_steps(self) -> float:
        """The update count that the optimizer keeps; it differs from `step` after skipped steps."""
        return optimizers.step_count(self.optimizer, self.model.masters())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor of a checkpoint that this process holds, by its name there."""
        masters = self.model.masters()
        moments = optimizers.state_tensors(self.optimizer, masters)
        return {
            **{f"{WEIGHT_PREFIX}{name}": weight.detach() for name, weight in masters.items()},
            **{f"{MOMENT_PREFIX}{name}": moment for name, moment in moments.items()},
        }

    def set_optimizer_steps(self, count: float) -> None:
        """Set the update count of the optimizer."""
        optimizers.set_step_count(self.optimizer, self.model.masters(), count)


def _checksum(sums: Iterable[int]) -> str:
    return f"{sum(sums) % 2**64:016x}"
