"""Optimizers as torch ships them, and the learning rate over the steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from regauge.training.settings import Optimizer, Schedule

MATRIX_DIMENSIONS = 2


def build(settings: Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return an optimizer over master weights; vectors are not decayed."""
    trained = [value for _, value in named if value.requires_grad]
    matrices = [value for value in trained if value.ndim >= MATRIX_DIMENSIONS]
    vectors = [value for value in trained if value.ndim < MATRIX_DIMENSIONS]
    groups = [
        {"params": values, "weight_decay": decay}
        for values, decay in ((matrices, settings.weight_decay), (vectors, 0.0))
        if values
    ]
    rate = settings.learning_rate
    if settings.kind == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=settings.betas[0])
    if settings.kind == "adafactor":
        return torch.optim.Adafactor(groups, lr=rate)
    return torch.optim.AdamW(
        groups, lr=rate, betas=settings.betas, eps=settings.epsilon, fused=True
    )


def learning_rate(peak: float, schedule: Schedule, step: int, total: int) -> float:
    """Return the learning rate of a step, counted from 0, of a run of `total` steps."""
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    left = 1 - (step - schedule.warmup_steps) / max(1, total - schedule.warmup_steps)
    left = max(0.0, left)
    shapes = {
        "constant": 1.0,
        "linear": left,
        "cosine": (1 + math.cos(math.pi * (1 - left))) / 2,
        "polynomial": math.pow(left, schedule.power),
    }
    shape = shapes[schedule.kind]
    return peak * (schedule.final_share + (1 - schedule.final_share) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group of an optimizer a learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def prime(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer allocate its state, with weights unchanged, so that it can be loaded."""
    kept = [(parameter, parameter.grad) for parameter in _parameters(optimizer)]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter, gradient in kept:
        parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient.zero_()
    set_learning_rate(optimizer, 0.0)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in kept:
        parameter.grad = gradient


def tensors(optimizer: torch.optim.Optimizer, masters: dict[str, nn.Parameter]) -> dict[str, Any]:
    """Return the optimizer's tensors as `<state>.<parameter>`, without its scalars."""
    return {
        f"{key}.{name}": value
        for name, state in _states(optimizer, masters)
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim > 0
    }


def steps_taken(optimizer: torch.optim.Optimizer, masters: dict[str, nn.Parameter]) -> float:
    """Return the step that an optimizer counts for its parameters; 0 where it counts none."""
    counts = [float(state["step"]) for _, state in _states(optimizer, masters) if "step" in state]
    return max(counts, default=0.0)


def set_steps_taken(
    optimizer: torch.optim.Optimizer, masters: dict[str, nn.Parameter], count: float
) -> None:
    """Put back what `steps_taken` returned."""
    for _, state in _states(optimizer, masters):
        if "step" in state:
            state["step"].fill_(count)


def _states(
    optimizer: torch.optim.Optimizer, masters: dict[str, nn.Parameter]
) -> list[tuple[str, dict[str, Any]]]:
    return [
        (name, optimizer.state[value])
        for name, value in masters.items()
        if value in optimizer.state
    ]


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [value for group in optimizer.param_groups for value in group["params"]]
