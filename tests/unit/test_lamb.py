"""LAMB compared with Algorithm 2 of its paper, computed by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distributed import datasets
from distributed.jobs import lines, losses
from distributed.runs import settings as run_settings
from regauge.accelerators.cpu import Cpu
from regauge.system import processes
from regauge.training import optimizer as optimizers
from regauge.training.lamb import Lamb
from regauge.training.run import attempt
from regauge.training.settings import Optimizer

BETAS = (0.9, 0.99)
EPSILON, RATE, DECAY = 0.5, 0.01, 0.1
GRADIENTS = ((0.5, -1.0), (-0.25, 2.0), (1.5, 0.0))


def settings(**changes: Any) -> Optimizer:
    base = {"kind": "lamb", "learning_rate": RATE, "betas": BETAS, "epsilon": EPSILON}
    return Optimizer.model_validate({**base, "weight_decay": DECAY, **changes})


def take_step(optimizer: torch.optim.Optimizer, value: Tensor, gradient: Any) -> list[float]:
    """Take one step; return the values of a row or a vector after it."""
    value.grad = torch.tensor(gradient).view(value.shape)
    optimizer.step()
    return value.detach().flatten().tolist()


def compute_by_hand(weights: list[float], steps: int, *, matrix: bool) -> list[float]:
    """Return the weights after some steps, computed with Python numbers."""
    first, second = [0.0, 0.0], [0.0, 0.0]
    for step in range(1, steps + 1):
        gradients = GRADIENTS[step - 1]
        first = [0.9 * m + 0.1 * g for m, g in zip(first, gradients, strict=True)]
        second = [0.99 * v + 0.01 * g * g for v, g in zip(second, gradients, strict=True)]
        update = [
            (m / (1 - 0.9**step)) / (math.sqrt(v / (1 - 0.99**step)) + EPSILON)
            for m, v in zip(first, second, strict=True)
        ]
        if matrix:
            update = [r + DECAY * w for r, w in zip(update, weights, strict=True)]
        ratio = math.hypot(*weights) / math.hypot(*update) if matrix else 1.0
        weights = [w - RATE * ratio * r for w, r in zip(weights, update, strict=True)]
    return weights


def test_the_first_step_of_a_matrix_by_hand() -> None:
    """The update is (0.5 / 1 + 0.3, -1 / 1.5 + 0.4), its norm 0.843274; the weights' norm is 5."""
    value = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    weights = take_step(optimizers.build_optimizer(settings(), [("w", value)]), value, [0.5, -1.0])
    ratio = 5 / 0.843274
    assert weights == pytest.approx([3 - 0.01 * ratio * 0.8, 4 + 0.01 * ratio * 0.8 / 3], rel=1e-6)


@pytest.mark.parametrize("lazy", [False, True])
def test_three_steps_equal_the_algorithm_of_the_paper(lazy: bool) -> None:  # noqa: FBT001
    """A matrix is decayed and scaled to its norm; a vector gets Adam's update unchanged."""
    matrix, vector = nn.Parameter(torch.tensor([[3.0, 4.0]])), nn.Parameter(torch.ones(2))
    optimizer = optimizers.build_optimizer(settings(), [("w", matrix), ("b", vector)], lazy=lazy)
    for step, gradient in enumerate(GRADIENTS, start=1):
        vector.grad = torch.tensor(gradient)
        weights = take_step(optimizer, matrix, gradient)
        assert weights == pytest.approx(compute_by_hand([3.0, 4.0], step, matrix=True), rel=1e-6)
        expected = compute_by_hand([1.0, 1.0], step, matrix=False)
        assert vector.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_matrix_is_scaled_without_weight_decay() -> None:
    """Scaling depends on the number of dimensions, not on the weight decay."""
    value = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    optimizer = optimizers.build_optimizer(settings(weight_decay=0.0), [("w", value)])
    moved = torch.tensor(take_step(optimizer, value, [0.5, -1.0])) - torch.tensor([3.0, 4.0])
    assert float(moved.norm()) == pytest.approx(RATE * 5, rel=1e-5)


@pytest.mark.parametrize("lazy", [False, True])
def test_weights_of_norm_zero_take_the_unscaled_update(lazy: bool) -> None:  # noqa: FBT001
    value = nn.Parameter(torch.zeros(1, 2))
    optimizer = optimizers.build_optimizer(settings(), [("w", value)], lazy=lazy)
    assert take_step(optimizer, value, [0.5, -1.0]) == pytest.approx([-0.01 * 0.5, 0.01 / 1.5])


def test_zero_gradients_change_no_weight() -> None:
    value = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    optimizer = optimizers.build_optimizer(settings(weight_decay=0.0), [("w", value)])
    assert take_step(optimizer, value, [0.0, 0.0]) == [3.0, 4.0]


def test_a_parameter_without_a_gradient_is_unchanged() -> None:
    one, other = (nn.Parameter(torch.ones(1, 2)) for _ in range(2))
    optimizer = optimizers.build_optimizer(settings(), [("one", one), ("other", other)])
    take_step(optimizer, one, [0.5, -1.0])
    assert other.tolist() == [[1.0, 1.0]]
    assert other not in optimizer.state


class NoHostReads(TorchDispatchMode):
    """Fails if the host reads a value of a tensor."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read"
        return func(*args, **(kwargs or {}))


def test_no_value_is_read_from_a_lazy_device() -> None:
    value = nn.Parameter(torch.ones(4, 3))
    lazy, other = (
        optimizers.build_optimizer(settings(), [("w", value)], lazy=lazy) for lazy in (True, False)
    )
    value.grad = torch.ones(4, 3)
    with NoHostReads():
        for number in range(3):
            optimizers.set_learning_rate(lazy, torch.tensor([0.1, 0.2, 0.3])[number])
            lazy.step()
    with pytest.raises(AssertionError, match="a value was read"), NoHostReads():
        other.step()


@pytest.mark.usefixtures("restored_threads")
def test_the_lazy_code_path_on_a_cpu_gives_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has rates from a table, counts as tensors, and a rehearsal before the first step."""
    data = datasets.write_packed(tmp_path / "data")
    run_losses = {}
    for lazy in (False, True):
        monkeypatch.setattr(Cpu, "is_lazy", property(lambda _, lazy=lazy: lazy))
        folder = tmp_path / f"run-{lazy}"
        changes = {"optimizer": {"kind": "lamb", "learning_rate": 0.01}, "strategy": "single"}
        attempt(run_settings(folder, data, "mlm", **changes), processes.World())
        run_losses[lazy] = losses(lines(folder))
    assert len(run_losses[True]) == 12
    assert run_losses[True] == pytest.approx(run_losses[False], rel=1e-5)
    assert run_losses[True][-1] < run_losses[True][0]


def test_the_state_has_the_names_of_adamw() -> None:
    value = nn.Parameter(torch.ones(4, 3))
    states = []
    for kind in ("adamw", "lamb"):
        optimizer = optimizers.build_optimizer(settings(kind=kind), [("w", value)])
        optimizers.prime_state(optimizer)
        saved = optimizers.state_tensors(optimizer, {"w": value})
        assert optimizers.step_count(optimizer, {"w": value}) == 1
        states.append({name: (tensor.shape, tensor.dtype) for name, tensor in saved.items()})
    assert states[0] == states[1]
    assert set(states[0]) == {"exp_avg.w", "exp_avg_sq.w"}


def test_a_closure_is_refused() -> None:
    optimizer = Lamb([{"params": [nn.Parameter(torch.ones(2))]}], 0.1)
    with pytest.raises(ValueError, match="does not support a closure"):
        optimizer.step(lambda: 0.0)
