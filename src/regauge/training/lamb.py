"""The LAMB optimizer: Adam's update, scaled to each weight matrix's norm.

You et al., 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
Algorithm 2. The algorithm's function phi is the identity, as in the authors' code
(google-research/albert, lamb_optimizer.py). That code does not scale biases and norms, which are
not decayed; neither does this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from regauge.models.tensors import local_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MOMENTS = ("exp_avg", "exp_avg_sq")


class Lamb(torch.optim.Optimizer):
    """LAMB with the state of torch's AdamW: `step`, `exp_avg` and `exp_avg_sq` per parameter.

    A parameter group has `weight_decay` and `use_trust_ratio`. All sharded parameters (DTensor) in
    a group must have the same mesh and placements; norms are over the unsharded parameters. With
    `capturable`, step counts and learning rates are tensors on the device, and nothing is read from
    the device.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        *,
        capturable: bool = False,
    ) -> None:
        self._capturable = capturable
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": 0.0,
            "use_trust_ratio": True,
        }
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter with a gradient."""
        if closure is not None:
            raise ValueError("Lamb does not support a closure")
        for group in self.param_groups:
            values = [value for value in group["params"] if value.grad is not None]
            if values:
                self._update_group(values, group)

    def _update_group(self, values: list[Tensor], group: dict[str, Any]) -> None:
        weights = [local_shard(value) for value in values]
        updates = self._compute_updates(values, group["betas"], group["eps"])
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        if group["use_trust_ratio"]:
            rates = _trust_ratios(values[0], weights, updates) * group["lr"]
            torch._foreach_mul_(updates, list(rates.unbind()))
        else:
            torch._foreach_mul_(updates, group["lr"])
        torch._foreach_sub_(weights, updates)

    def _compute_updates(
        self, values: list[Tensor], betas: tuple[float, float], epsilon: float
    ) -> list[Tensor]:
        """Update the moments; return Adam's update for each parameter's local shard."""
        states = [self._state_of(value) for value in values]
        first, second = ([local_shard(state[name]) for state in states] for name in MOMENTS)
        gradients = [local_shard(value.grad) for value in values if value.grad is not None]
        counts = [state["step"] for state in states]
        torch._foreach_add_(counts, 1.0)
        torch._foreach_lerp_(first, gradients, 1 - betas[0])
        torch._foreach_mul_(second, betas[1])
        torch._foreach_addcmul_(second, gradients, gradients, 1 - betas[1])
        # A count on the host is read as a number; a count on the device stays a tensor.
        steps = counts if self._capturable else [float(count) for count in counts]
        updates = [root.sqrt() for root in second]
        torch._foreach_div_(updates, [(1 - betas[1] ** step) ** 0.5 for step in steps])
        torch._foreach_add_(updates, epsilon)
        torch._foreach_mul_(updates, [1 - betas[0] ** step for step in steps])
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, first)
        return updates

    def _state_of(self, value: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[value]
        if not state:
            state["step"] = torch.zeros((), device=value.device if self._capturable else "cpu")
            state.update({name: torch.zeros_like(value) for name in MOMENTS})
        return state


def _trust_ratios(parameter: Tensor, weights: list[Tensor], updates: list[Tensor]) -> Tensor:
    """Divide each parameter's norm by its update's norm, [parameters].

    The ratio is 1 if either norm is 0. All parameters share the mesh and placements of `parameter`.
    The squared norms [2, parameters] are summed over the mesh in one collective.
    """
    norms = torch.stack(torch._foreach_norm([*weights, *updates]))  # noqa: SLF001 - torch's own name
    squares = norms.square().view(2, -1)
    if isinstance(parameter, DTensor):
        placements = [
            Partial() if placement.is_shard() else Replicate() for placement in parameter.placements
        ]
        squares = DTensor.from_local(squares, parameter.device_mesh, placements).full_tensor()
    weight_norms, update_norms = squares.sqrt()
    has_ratio = (weight_norms > 0) & (update_norms > 0)
    return torch.where(has_ratio, weight_norms / update_norms, 1.0)
