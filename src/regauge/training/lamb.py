"""LAMB: Adam's update, scaled for each weight matrix to the norm of the matrix.

You et al., 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
Algorithm 2. Its phi is the identity, as in the authors' code (google-research/albert,
lamb_optimizer.py), which also leaves out of the scaling what it does not decay: biases and norms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from regauge.models.tensors import local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MOMENTS = ("exp_avg", "exp_avg_sq")


class Lamb(torch.optim.Optimizer):
    """LAMB with the state of torch's AdamW: `step`, `exp_avg` and `exp_avg_sq` of each parameter.

    A group has `weight_decay`, and `adapted`: whether its parameters are scaled. Where they are
    shards, all of a group lie on one mesh alike, and norms are those of the whole parameters. Where
    the optimizer is capturable, counts and rates are data on the device and nothing is read there.
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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "adapted": True}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Change every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("a closure is not called here")
        for group in self.param_groups:
            values = [value for value in group["params"] if value.grad is not None]
            if values:
                self._change(values, group)

    def _change(self, values: list[Tensor], group: dict[str, Any]) -> None:
        weights = [local(value) for value in values]
        updates = self._updates(values, group["betas"], group["eps"])
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        if group["adapted"]:
            rates = _ratios(values[0], weights, updates) * group["lr"]
            torch._foreach_mul_(updates, list(rates.unbind()))
        else:
            torch._foreach_mul_(updates, group["lr"])
        torch._foreach_sub_(weights, updates)

    def _updates(
        self, values: list[Tensor], betas: tuple[float, float], epsilon: float
    ) -> list[Tensor]:
        """Return Adam's update of each parameter's part that is here, after taking its gradient."""
        states = [self._state_of(value) for value in values]
        first, second = ([local(state[name]) for state in states] for name in MOMENTS)
        gradients = [local(value.grad) for value in values if value.grad is not None]
        counts = [state["step"] for state in states]
        torch._foreach_add_(counts, 1.0)
        torch._foreach_lerp_(first, gradients, 1 - betas[0])
        torch._foreach_mul_(second, betas[1])
        torch._foreach_addcmul_(second, gradients, gradients, 1 - betas[1])
        # A count on the host is read as a number; one on the device stays data.
        taken = counts if self._capturable else [float(count) for count in counts]
        updates = [root.sqrt() for root in second]
        torch._foreach_div_(updates, [(1 - betas[1] ** count) ** 0.5 for count in taken])
        torch._foreach_add_(updates, epsilon)
        torch._foreach_mul_(updates, [1 - betas[0] ** count for count in taken])
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, first)
        return updates

    def _state_of(self, value: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[value]
        if not state:
            state["step"] = torch.zeros((), device=value.device if self._capturable else "cpu")
            state.update({name: torch.zeros_like(value) for name in MOMENTS})
        return state


def _ratios(like: Tensor, weights: list[Tensor], updates: list[Tensor]) -> Tensor:
    """Return the norm of each parameter over that of its update, 1 where either is 0; [parameters].

    The squares of all norms, [2, parameters], are summed over a mesh in one message.
    """
    norms = torch.stack(torch._foreach_norm([*weights, *updates]))  # noqa: SLF001 - torch's own name
    squares = norms.square().view(2, -1)
    if isinstance(like, DTensor):
        spread = [Partial() if one.is_shard() else Replicate() for one in like.placements]
        squares = DTensor.from_local(squares, like.device_mesh, spread).full_tensor()
    weight, update = squares.sqrt()
    known = (weight > 0) & (update > 0)
    return torch.where(known, weight / update, 1.0)
