"""Optimizers as torch ships them, LAMB beside them, and the learning rate over the steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from regauge.errors import SettingsError
from regauge.training.lamb import Lamb

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from regauge.training.settings import Optimizer, Schedule

MATRIX_DIMENSIONS = 2
PRIMING_RATE = 1e-3
TABLE_STEPS = 1024
REHEARSAL_RATE = 1e-30
"""So small that its product with a decay vanishes beside 1; 0 would be divided by."""


def build_optimizer(
    settings: Optimizer, named: Iterable[tuple[str, nn.Parameter]], *, lazy: bool = False
) -> torch.optim.Optimizer:
    """Return an optimizer over master weights; vectors are not decayed, nor scaled by lamb.

    On a lazy device its step count and its rate are data there (`capturable`).
    """
    sorts: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, value in named:
        if value.requires_grad:
            matrix = value.ndim >= MATRIX_DIMENSIONS
            sorts.setdefault((lr_multiplier(settings, name), matrix), []).append(value)
    groups: list[dict[str, Any]] = [
        {
            "params": sorts[of, matrix],
            "weight_decay": settings.weight_decay if matrix else 0.0,
            "share": of,
            "adapted": matrix,
        }
        for of, matrix in sorted(sorts, reverse=True)
    ]
    groups = groups or [{"params": []}]  # of a process that owns nothing that is trained
    rate = settings.learning_rate
    if settings.kind == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=settings.betas[0])
    if settings.kind == "adafactor":
        return torch.optim.Adafactor(groups, lr=rate)
    held = torch.tensor(rate) if lazy else rate
    if settings.kind == "lamb":
        return Lamb(groups, held, settings.betas, settings.epsilon, capturable=lazy)
    return torch.optim.AdamW(
        groups,
        lr=held,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=not lazy,
        capturable=lazy,
    )


class LRSchedule:
    """The learning rate of every step: a number, or read from a table on a lazy device.

    The table is sent anew every `TABLE_STEPS` steps, so that its size depends on no run's length.
    """

    def __init__(
        self, settings: Optimizer, total: int, device: torch.device, *, lazy: bool
    ) -> None:
        self._settings = settings
        self._total = total
        self._device = device
        self._lazy = lazy
        self.offset = 0
        """Steps of the schedule that an earlier run has done."""
        self.seek(0)

    def seek(self, step: int) -> None:
        """Go to a step, counted from 0; -1 is a rehearsal."""
        self._step = step
        if self._lazy:
            steps = range(step, step + TABLE_STEPS)
            self._table = torch.tensor([self.rate_at(each) for each in steps]).to(self._device)
            self._place = torch.tensor([0]).to(self._device)
            self._last = steps.stop

    def next(self) -> float | Tensor:
        """Return the rate of the next step as the optimizer takes it."""
        if not self._lazy:
            self._step += 1
            return self.rate_at(self._step - 1)
        if self._step == self._last:
            self.seek(self._step)
        self._step += 1
        here = self._table.index_select(0, self._place)[0]
        self._place += 1
        return here

    def rate_at(self, step: int) -> float:
        """Return the rate of a step as a number."""
        if step < 0:
            return REHEARSAL_RATE
        return learning_rate(
            self._settings.learning_rate,
            self._settings.schedule,
            self.offset + step,
            self.offset + self._total,
        )


def learning_rate(peak: float, schedule: Schedule, step: int, total: int) -> float:
    """Return the learning rate of a step, counted from 0, of a run of `total` steps.

    "wsd" is warm-up, stable, decay (Hu et al., 2024, "MiniCPM", section 4); what a warm-up leaves
    of the steps is the most that it decays in.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    after = max(1, total - schedule.warmup_steps)
    left = max(0.0, 1 - (step - schedule.warmup_steps) / after)
    decaying = min(after, schedule.decay_share * total)
    shapes = {
        "constant": 1.0,
        "linear": left,
        "cosine": (1 + math.cos(math.pi * (1 - left))) / 2,
        "polynomial": math.pow(left, schedule.power),
        "wsd": min(1.0, left * after / decaying),
    }
    shape = shapes[schedule.kind]
    return peak * (schedule.final_share + (1 - schedule.final_share) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float | Tensor) -> None:
    """Give every group of an optimizer a learning rate."""
    for group in optimizer.param_groups:
        own = group.get("share", 1.0)
        group["lr"] = rate if own == 1 else rate * own


def lr_multiplier(settings: Optimizer, name: str) -> float:
    """Return the share of the learning rate that a weight gets: that of the longest beginning."""
    fitting = [each for each in settings.shares if name.startswith(each)]
    return settings.shares[max(fitting, key=len)] if fitting else 1.0


def check_lr_multipliers(settings: Optimizer, names: Iterable[str]) -> None:
    """Raise SettingsError for a share of the learning rate that no weight gets."""
    known = list(names)
    for beginning in settings.shares:
        if not any(name.startswith(beginning) for name in known):
            first = sorted({f"{name.partition('.')[0]}." for name in known})
            raise SettingsError(
                f"optimizer.shares: no weight's name begins with '{beginning}'",
                f"names begin with {', '.join(first)}",
            )


def prime_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer allocate its state, with weights unchanged, so that it can be loaded.

    Without gradients and decay no rate changes a weight; a rate of 0 would be divided by.
    """
    kept = [(parameter, parameter.grad) for parameter in _parameters(optimizer)]
    settings = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for parameter, gradient in kept:
        parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient.zero_()
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = PRIMING_RATE, 0.0
    optimizer.step()
    for group, (rate, decay) in zip(optimizer.param_groups, settings, strict=True):
        group["lr"], group["weight_decay"] = rate, decay
    for parameter, gradient in kept:
        parameter.grad = gradient


def state_tensors(
    optimizer: torch.optim.Optimizer, masters: dict[str, nn.Parameter]
) -> dict[str, Any]:
    """Return the optimizer's tensors as `<state>.<parameter>`, without its scalars."""
    return {
        f"{key}.{name}": value
        for name, state in _states(optimizer, masters)
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim > 0
    }


def steps_taken(optimizer: torch.optim.Optimizer, masters: dict[str, nn.Parameter]) -> float:
    """Return the step that an optimizer counts for its parameters; 0 where it counts none.

    They are equal, and one is read: each reading of a device is a wait for it.
    """
    counts = (state["step"] for _, state in _states(optimizer, masters) if "step" in state)
    return float(next(counts, 0.0))


def set_steps_taken(
    optimizer: torch.optim.Optimizer, masters: dict[str, nn.Parameter], count: float
) -> None:
    """Put back what `steps_taken` returned."""
    for _, state in _states(optimizer, masters):
        if "step" in state:
            state["step"].copy_(torch.tensor(count))


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
