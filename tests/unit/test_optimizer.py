"""The learning rate over the steps, and optimizers whose state can be loaded."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from regauge.training import optimizer as optimizers
from regauge.training.optimizer import learning_rate
from regauge.training.settings import Optimizer, Schedule

TOTAL = 100


def rates(**schedule: object) -> list[float]:
    shape = Schedule.model_validate(schedule)
    return [learning_rate(2.0, shape, step, TOTAL) for step in range(TOTAL + 10)]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "polynomial"])
@pytest.mark.parametrize("final_share", [0.0, 0.1])
def test_every_shape_rises_to_the_peak_and_never_rises_again(kind: str, final_share: float) -> None:
    found = rates(kind=kind, warmup_steps=10, final_share=final_share)
    assert found[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert found[9] == found[10] == 2.0 == max(found)
    assert all(before >= after for before, after in pairwise(found[10:]))
    end = 2.0 if kind == "constant" else 2.0 * final_share
    assert found[TOTAL:] == pytest.approx([end] * 10)


def test_the_shapes_half_way() -> None:
    assert rates(kind="linear")[50] == pytest.approx(1.0)
    assert rates(kind="cosine")[50] == pytest.approx(1.0)
    assert rates(kind="cosine")[25] == pytest.approx(2 * (1 + 0.5**0.5) / 2)
    assert rates(kind="polynomial", power=3.0)[50] == pytest.approx(2 / 8)
    assert rates(kind="linear", final_share=0.5)[50] == pytest.approx(1.5)


def test_a_run_of_one_step_has_a_rate() -> None:
    for kind in ("constant", "linear", "cosine", "polynomial"):
        schedule = Schedule.model_validate({"kind": kind})
        assert learning_rate(2.0, schedule, 0, 1) == pytest.approx(2.0)


def trained(kind: str, steps: int) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    settings = Optimizer.model_validate({"kind": kind, "learning_rate": 0.1})
    own = optimizers.build(settings, layer.named_parameters())
    for _ in range(steps):
        own.zero_grad()
        layer(torch.ones(2, 4)).square().sum().backward()
        own.step()
    return layer, own


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adafactor"])
def test_a_primed_optimizer_takes_the_state_of_another_and_goes_on(kind: str) -> None:
    layer, own = trained(kind, 3)
    masters = dict(layer.named_parameters())
    kept = {name: value.clone() for name, value in optimizers.tensors(own, masters).items()}
    count = optimizers.steps_taken(own, masters)
    assert kept
    assert all(value.ndim for value in kept.values())

    copy, fresh = trained(kind, 0)
    copy.load_state_dict(layer.state_dict())
    gradients = {name: value.grad for name, value in copy.named_parameters()}
    optimizers.prime(fresh)
    for name, value in copy.named_parameters():
        assert value.equal(masters[name]), "priming changed a weight"
        assert value.grad is gradients[name]
    others = dict(copy.named_parameters())
    empty = optimizers.tensors(fresh, others)
    assert empty.keys() == kept.keys()
    for name, value in empty.items():
        value.copy_(kept[name])
    optimizers.set_steps_taken(fresh, others, count)
    for module, optimizer in ((layer, own), (copy, fresh)):
        optimizer.zero_grad()
        module(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    assert copy.weight.equal(layer.weight)
    assert copy.bias.equal(layer.bias)


def test_vectors_are_not_decayed_and_frozen_weights_are_left_out() -> None:
    layer = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    layer[2].requires_grad_(requires_grad=False)
    own = optimizers.build(Optimizer(weight_decay=0.1), layer.named_parameters())
    groups = [(len(group["params"]), group["weight_decay"]) for group in own.param_groups]
    assert groups == [(1, 0.1), (3, 0.0)]


def test_a_table_of_rates_is_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lazy device reads its rates from tables that follow one another."""
    monkeypatch.setattr(optimizers, "TABLE_STEPS", 3)
    settings = Optimizer(learning_rate=0.5, schedule=Schedule(kind="cosine", warmup_steps=2))
    rates = {
        lazy: optimizers.Rates(settings, 9, torch.device("cpu"), lazy=lazy)
        for lazy in (False, True)
    }
    for start in (0, 4):
        for each in rates.values():
            each.begin(start)
        for step in range(start, 9):
            expected = optimizers.learning_rate(0.5, settings.schedule, step, 9)
            assert rates[False].next() == expected
            assert float(rates[True].next()) == pytest.approx(expected)
    rates[True].begin(-1)
    assert 0 < float(rates[True].next()) < 1e-20
