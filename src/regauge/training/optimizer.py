"""Builds optimizers (torch's, and LAMB), accesses their state, and schedules the learning rate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from regauge.data.randomness import hash_keys
from regauge.system.errors import SettingsError
from regauge.training.lamb import Lamb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    from regauge.accelerators import Batch
    from regauge.training.context import RunContext
    from regauge.training.settings import Optimizer, Schedule
    from regauge.training.state import TrainState
    from regauge.training.task_runtime import TaskRuntime

MIN_MATRIX_DIMS = 2
"""Parameters with fewer dimensions (biases, norms) are not decayed."""
PRIMING_LR = 1e-3
TABLE_STEPS = 1024
"""Learning rates sent to a lazy device at a time."""
REHEARSAL_LR = 1e-30
"""A vanishing learning rate: 1 minus its product with the decay is 1. Division by 0 is avoided."""


def build_optimizer(
    settings: Optimizer, parameters: Iterable[tuple[str, nn.Parameter]], *, lazy: bool = False
) -> torch.optim.Optimizer:
    """Build an optimizer over named master weights.

    Vectors (biases, norms) get neither weight decay nor a LAMB trust ratio. On a lazy device the
    step count and the learning rate are tensors on the device (`capturable`).
    """
    members: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, value in parameters:
        if value.requires_grad:
            is_matrix = value.ndim >= MIN_MATRIX_DIMS
            members.setdefault((lr_multiplier(settings, name), is_matrix), []).append(value)
    groups: list[dict[str, Any]] = [
        {
            "params": members[multiplier, is_matrix],
            "weight_decay": settings.weight_decay if is_matrix else 0.0,
            "lr_multiplier": multiplier,
            "use_trust_ratio": is_matrix,
        }
        for multiplier, is_matrix in sorted(members, reverse=True)
    ]
    groups = groups or [{"params": []}]  # a process that owns no trained parameter
    lr, betas = settings.peak_learning_rate, settings.moment_decay_rates
    if settings.kind == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=betas[0])
    if settings.kind == "adafactor":
        return torch.optim.Adafactor(groups, lr=lr)
    capturable_lr = torch.tensor(lr) if lazy else lr
    if settings.kind == "lamb":
        return Lamb(groups, capturable_lr, betas, settings.epsilon, capturable=lazy)
    return torch.optim.AdamW(
        groups,
        lr=capturable_lr,
        betas=betas,
        eps=settings.epsilon,
        fused=not lazy,
        capturable=lazy,
    )


class LRSchedule:
    """Per-step learning rate: a number, or on a lazy device a table element.

    The table is copied to the device every `TABLE_STEPS` steps. Its size does not depend on the run
    length, so graphs do not depend on it either.
    """

    def __init__(
        self, settings: Optimizer, total_steps: int, device: torch.device, *, lazy: bool
    ) -> None:
        self._settings = settings
        self._total_steps = total_steps
        self._device = device
        self._lazy = lazy
        self.offset = 0
        """Schedule steps already done by an earlier run."""
        self.seek(0)

    def seek(self, step: int) -> None:
        """Move to a step, counted from 0; -1 is a rehearsal step."""
        self._step = step
        if self._lazy:
            steps = range(step, step + TABLE_STEPS)
            self._table = torch.tensor([self.rate_at(index) for index in steps]).to(self._device)
            self._index = torch.tensor([0]).to(self._device)
            self._table_end = steps.stop

    def next(self) -> float | Tensor:
        """Return the current learning rate, and advance by one step."""
        if not self._lazy:
            self._step += 1
            return self.rate_at(self._step - 1)
        if self._step == self._table_end:
            self.seek(self._step)
        self._step += 1
        rate = self._table.index_select(0, self._index)[0]
        self._index += 1
        return rate

    def rate_at(self, step: int) -> float:
        if step < 0:
            return REHEARSAL_LR
        return learning_rate(
            self._settings.peak_learning_rate,
            self._settings.schedule,
            self.offset + step,
            self.offset + self._total_steps,
        )


def learning_rate(peak: float, schedule: Schedule, step: int, total_steps: int) -> float:
    """Return the learning rate at a step, counted from 0, in a run of `total_steps`.

    "wsd" is warm-up, stable, decay (Hu et al., 2024, "MiniCPM", section 4). Its decay is at most as
    long as the steps after the warm-up.
    """
    warmup_steps = schedule.num_warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    steps_after_warmup = max(1, total_steps - warmup_steps)
    remaining = max(0.0, 1 - (step - warmup_steps) / steps_after_warmup)
    decay_steps = min(steps_after_warmup, schedule.decay_fraction * total_steps)
    factors = {
        "constant": 1.0,
        "linear": remaining,
        "cosine": (1 + math.cos(math.pi * (1 - remaining))) / 2,
        "polynomial": math.pow(remaining, schedule.power),
        "wsd": min(1.0, remaining * steps_after_warmup / decay_steps),
    }
    factor = factors[schedule.kind]
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * factor)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float | Tensor) -> None:
    """Set each parameter group's learning rate to `rate` times the group's multiplier."""
    for group in optimizer.param_groups:
        multiplier = group.get("lr_multiplier", 1.0)
        group["lr"] = rate if multiplier == 1 else rate * multiplier


def lr_multiplier(settings: Optimizer, name: str) -> float:
    """Return a weight's learning rate multiplier; the longest matching prefix decides."""
    prefixes = [prefix for prefix in settings.lr_multipliers if name.startswith(prefix)]
    return settings.lr_multipliers[max(prefixes, key=len)] if prefixes else 1.0


def check_lr_multipliers(settings: Optimizer, names: Iterable[str]) -> None:
    """Raise SettingsError for a learning rate multiplier whose prefix matches no weight."""
    weight_names = list(names)
    for prefix in settings.lr_multipliers:
        if not any(name.startswith(prefix) for name in weight_names):
            valid = sorted({f"{name.partition('.')[0]}." for name in weight_names})
            raise SettingsError(
                f"optimizer.lr_multipliers: no weight's name begins with '{prefix}'",
                f"names begin with {', '.join(valid)}",
            )


def prime_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the optimizer state, so a checkpoint can be loaded into it.

    It does one update with zero gradients and no decay, which changes no weight. The learning rate
    is not 0, because some optimizers divide by it.
    """
    gradients = [(parameter, parameter.grad) for parameter in _parameters(optimizer)]
    settings = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for parameter, gradient in gradients:
        parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient.zero_()
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = PRIMING_LR, 0.0
    optimizer.step()
    for group, (lr, weight_decay) in zip(optimizer.param_groups, settings, strict=True):
        group["lr"], group["weight_decay"] = lr, weight_decay
    for parameter, gradient in gradients:
        parameter.grad = gradient


def state_tensors(
    optimizer: torch.optim.Optimizer, masters: dict[str, nn.Parameter]
) -> dict[str, Any]:
    """`<state>.<parameter>` -> optimizer tensor; scalars are left out."""
    return {
        f"{key}.{name}": value
        for name, state in _parameter_states(optimizer, masters)
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim > 0
    }


def step_count(optimizer: torch.optim.Optimizer, masters: dict[str, nn.Parameter]) -> float:
    """Return the optimizer's update count; 0 if it keeps none.

    It is equal for all parameters. Only one is read, because each read waits for the device.
    """
    states = (state for _, state in _parameter_states(optimizer, masters))
    return float(next((state["step"] for state in states if "step" in state), 0.0))


def set_step_count(
    optimizer: torch.optim.Optimizer, masters: dict[str, nn.Parameter], count: float
) -> None:
    for _, state in _parameter_states(optimizer, masters):
        if "step" in state:
            state["step"].copy_(torch.tensor(count))


def _parameter_states(
    optimizer: torch.optim.Optimizer, masters: dict[str, nn.Parameter]
) -> list[tuple[str, dict[str, Any]]]:
    return [
        (name, optimizer.state[value])
        for name, value in masters.items()
        if value in optimizer.state
    ]


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [value for group in optimizer.param_groups for value in group["params"]]


def optimizer_step(
    context: RunContext, state: TrainState, batches: list[Batch], task: TaskRuntime | None = None
) -> tuple[Tensor, Tensor]:
    """Do one step; return the global batch's [loss sum, weight] and the gradient norm.

    `task` defaults to this step's task. Nothing is read from the device unless the loss is scaled.
    """
    task = task or context.task_at(state.step)
    task_index = context.tasks.index(task)
    model, max_norm = state.model, context.settings.optimizer.max_grad_norm
    scale = state.loss_scale.tensor(context.device)
    fault_factor = context.hooks.gradient_factor(state.step)
    with context.hooks.compilation():
        totals = task.gradients.accumulate_gradients(
            batches,
            scale if fault_factor == 1 else scale * fault_factor,
            _dropout_seed(context, state),
        )
        learning_rate = state.lr_schedule.next()
        factor = 1 / (totals[1].clamp(min=1e-9) * scale)
        norm = model.gradient_norm() * factor
        if max_norm is not None:
            factor = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if state.loss_scale.should_update(norm) and state.guard.should_update(
            norm, totals, task_index
        ):
            model.scale_gradients(factor)
            set_learning_rate(state.optimizer, state.guard.masked_lr(learning_rate))
            context.saver.wait_for_copies()
            state.optimizer.step()
            model.sync_weights()
        model.clear_gradients()
        finite_totals = totals.where(norm.isfinite(), totals.new_zeros(()))
        context.metrics.add(finite_totals, norm, task_index)
        context.accelerator.end_step()
    return totals, norm


def _dropout_seed(context: RunContext, state: TrainState) -> Callable[[int], None] | None:
    """Return what seeds torch's generators for a microbatch; None for counter-based dropout."""
    if context.settings.model.dropout_kind == "counter":
        return None
    keys = context.settings.seed, state.step, context.world.rank
    return lambda microbatch: context.accelerator.seed(int(hash_keys(*keys, microbatch)) >> 1)
