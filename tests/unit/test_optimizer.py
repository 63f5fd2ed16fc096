"""Learning rate schedules, and optimizers whose state can be loaded."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from regauge.config import build
from regauge.system.errors import SettingsError
from regauge.training import optimizer as optimizers
from regauge.training.optimizer import learning_rate
from regauge.training.settings import Optimizer, Schedule

TOTAL = 100
BETAS = (0.9, 0.98)


def compute_rates(**schedule: object) -> list[float]:
    shape = Schedule.model_validate({"warmup_steps": 0, **schedule})
    return [learning_rate(2.0, shape, step, TOTAL) for step in range(TOTAL + 10)]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "polynomial", "wsd"])
@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.1])
def test_every_schedule_rises_to_the_peak_and_never_rises_again(
    kind: str, min_lr_ratio: float
) -> None:
    rates = compute_rates(kind=kind, warmup_steps=10, min_lr_ratio=min_lr_ratio)
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[9] == rates[10] == 2.0 == max(rates)
    assert all(before >= after for before, after in pairwise(rates[10:]))
    end = 2.0 if kind == "constant" else 2.0 * min_lr_ratio
    assert rates[TOTAL:] == pytest.approx([end] * 10)


def test_schedules_at_half_of_the_steps() -> None:
    assert compute_rates(kind="linear")[50] == pytest.approx(1.0)
    assert compute_rates(kind="cosine")[50] == pytest.approx(1.0)
    assert compute_rates(kind="cosine")[25] == pytest.approx(2 * (1 + 0.5**0.5) / 2)
    assert compute_rates(kind="polynomial", power=3.0)[50] == pytest.approx(2 / 8)
    assert compute_rates(kind="linear", min_lr_ratio=0.5)[50] == pytest.approx(1.5)


def test_wsd_stays_at_the_peak_until_its_last_steps() -> None:
    rates = compute_rates(kind="wsd", warmup_steps=10, decay_fraction=0.2)
    assert rates[10:81] == [2.0] * 71
    assert rates[81:100] == pytest.approx([2.0 * (20 - step) / 20 for step in range(1, 20)])
    assert compute_rates(kind="wsd", decay_fraction=0.2, min_lr_ratio=0.1)[90] == pytest.approx(1.1)


def test_wsd_decays_in_the_steps_after_the_warm_up() -> None:
    rates = compute_rates(kind="wsd", warmup_steps=60, decay_fraction=0.8)
    assert rates[59] == rates[60] == 2.0
    assert rates[80] == pytest.approx(1.0)
    linear = compute_rates(kind="linear")
    assert compute_rates(kind="wsd", decay_fraction=1.0) == pytest.approx(linear)


def test_a_run_of_one_step_has_a_learning_rate() -> None:
    for kind in ("constant", "linear", "cosine", "polynomial", "wsd"):
        schedule = Schedule.model_validate({"kind": kind, "warmup_steps": 0})
        assert learning_rate(2.0, schedule, 0, 1) == pytest.approx(2.0)


def train_layer(kind: str, steps: int) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    settings = Optimizer.model_validate({"kind": kind, "learning_rate": 0.1, "betas": BETAS})
    optimizer = optimizers.build_optimizer(settings, layer.named_parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        layer(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize("kind", ["adamw", "lamb", "sgd", "adafactor"])
def test_a_primed_optimizer_continues_with_a_loaded_state(kind: str) -> None:
    layer, trained = train_layer(kind, 3)
    masters = dict(layer.named_parameters())
    moments = optimizers.state_tensors(trained, masters)
    saved = {name: value.clone() for name, value in moments.items()}
    count = optimizers.step_count(trained, masters)
    assert saved
    assert all(value.ndim for value in saved.values())

    copy, fresh = train_layer(kind, 0)
    copy.load_state_dict(layer.state_dict())
    gradients = {name: value.grad for name, value in copy.named_parameters()}
    optimizers.prime_state(fresh)
    for name, value in copy.named_parameters():
        assert value.equal(masters[name]), "priming changed a weight"
        assert value.grad is gradients[name]
    others = dict(copy.named_parameters())
    empty = optimizers.state_tensors(fresh, others)
    assert empty.keys() == saved.keys()
    for name, value in empty.items():
        value.copy_(saved[name])
    optimizers.set_step_count(fresh, others, count)
    for module, optimizer in ((layer, trained), (copy, fresh)):
        optimizer.zero_grad()
        module(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    assert copy.weight.equal(layer.weight)
    assert copy.bias.equal(layer.bias)


@pytest.mark.parametrize("betas", [(0.9, 1.0), (-0.1, 0.9)])
def test_a_decay_rate_of_one_is_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(SettingsError, match="betas"):
        build(Optimizer, {"betas": betas})


def test_vectors_are_not_decayed_and_frozen_weights_are_left_out() -> None:
    layer = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    layer[2].requires_grad_(requires_grad=False)
    optimizer = optimizers.build_optimizer(
        Optimizer(learning_rate=0.1, betas=BETAS, weight_decay=0.1), layer.named_parameters()
    )
    groups = [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
    assert groups == [(1, 0.1), (3, 0.0)]


def test_the_table_of_a_lazy_device_equals_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lazy device reads its learning rates from consecutive tables."""
    monkeypatch.setattr(optimizers, "TABLE_STEPS", 3)
    settings = Optimizer(learning_rate=0.5, schedule=Schedule(kind="cosine", warmup_steps=2))
    compute_rates = {
        lazy: optimizers.LRSchedule(settings, 9, torch.device("cpu"), lazy=lazy)
        for lazy in (False, True)
    }
    for start in (0, 4):
        for schedule in compute_rates.values():
            schedule.seek(start)
        for step in range(start, 9):
            expected = optimizers.learning_rate(0.5, settings.schedule, step, 9)
            assert compute_rates[False].next() == expected
            assert float(compute_rates[True].next()) == pytest.approx(expected)
    compute_rates[True].seek(-1)
    assert 0 < float(compute_rates[True].next()) < 1e-20


def test_learning_rate_multipliers_apply_by_prefix() -> None:
    layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    multipliers = {"0.": 0.5, "0.bias": 0.0}
    settings = Optimizer(
        learning_rate=0.1, betas=BETAS, lr_multipliers=multipliers, weight_decay=0.1
    )
    optimizer = optimizers.build_optimizer(settings, layers.named_parameters())
    optimizers.set_learning_rate(optimizer, 0.2)
    groups = optimizer.param_groups
    group_sizes = {(group["lr"], group["weight_decay"]): len(group["params"]) for group in groups}
    assert group_sizes == {(0.2, 0.1): 1, (0.2, 0.0): 1, (0.1, 0.1): 1, (0.0, 0.0): 1}
    optimizers.check_lr_multipliers(settings, dict(layers.named_parameters()))
    wrong, names = Optimizer(lr_multipliers={"modle.": 0.5}), list(dict(layers.named_parameters()))
    with pytest.raises(SettingsError, match=r"begins with 'modle\.'; names begin with 0\., 1\."):
        optimizers.check_lr_multipliers(wrong, names)


def test_an_optimizer_without_parameters_works() -> None:
    optimizer = optimizers.build_optimizer(Optimizer(learning_rate=0.1, betas=BETAS), [])
    optimizers.prime_state(optimizer)
    optimizer.step()
    assert optimizer.param_groups[0]["params"] == []
