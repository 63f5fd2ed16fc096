"""The learning rate over the steps, and optimizers whose state can be loaded."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from regauge.config import build
from regauge.errors import SettingsError
from regauge.training import optimizer as optimizers
from regauge.training.optimizer import learning_rate
from regauge.training.settings import Optimizer, Schedule

TOTAL = 100


def rates(**schedule: object) -> list[float]:
    shape = Schedule.model_validate(schedule)
    return [learning_rate(2.0, shape, step, TOTAL) for step in range(TOTAL + 10)]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "polynomial", "wsd"])
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


def test_wsd_stays_at_the_peak_until_its_last_steps() -> None:
    found = rates(kind="wsd", warmup_steps=10, decay_share=0.2)
    assert found[10:81] == [2.0] * 71
    assert found[81:100] == pytest.approx([2.0 * (20 - step) / 20 for step in range(1, 20)])
    assert rates(kind="wsd", decay_share=0.2, final_share=0.1)[90] == pytest.approx(1.1)


def test_wsd_decays_in_what_the_warm_up_leaves() -> None:
    found = rates(kind="wsd", warmup_steps=60, decay_share=0.8)
    assert found[59] == found[60] == 2.0
    assert found[80] == pytest.approx(1.0)
    assert rates(kind="wsd", decay_share=1.0) == pytest.approx(rates(kind="linear"))


def test_a_run_of_one_step_has_a_rate() -> None:
    for kind in ("constant", "linear", "cosine", "polynomial", "wsd"):
        schedule = Schedule.model_validate({"kind": kind})
        assert learning_rate(2.0, schedule, 0, 1) == pytest.approx(2.0)


def trained(kind: str, steps: int) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    settings = Optimizer.model_validate({"kind": kind, "learning_rate": 0.1})
    own = optimizers.build_optimizer(settings, layer.named_parameters())
    for _ in range(steps):
        own.zero_grad()
        layer(torch.ones(2, 4)).square().sum().backward()
        own.step()
    return layer, own


@pytest.mark.parametrize("kind", ["adamw", "lamb", "sgd", "adafactor"])
def test_a_primed_optimizer_takes_the_state_of_another_and_goes_on(kind: str) -> None:
    layer, own = trained(kind, 3)
    masters = dict(layer.named_parameters())
    kept = {name: value.clone() for name, value in optimizers.state_tensors(own, masters).items()}
    count = optimizers.steps_taken(own, masters)
    assert kept
    assert all(value.ndim for value in kept.values())

    copy, fresh = trained(kind, 0)
    copy.load_state_dict(layer.state_dict())
    gradients = {name: value.grad for name, value in copy.named_parameters()}
    optimizers.prime_state(fresh)
    for name, value in copy.named_parameters():
        assert value.equal(masters[name]), "priming changed a weight"
        assert value.grad is gradients[name]
    others = dict(copy.named_parameters())
    empty = optimizers.state_tensors(fresh, others)
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


@pytest.mark.parametrize("betas", [(0.9, 1.0), (-0.1, 0.9)])
def test_a_moment_that_never_forgets_is_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(SettingsError, match="betas"):
        build(Optimizer, {"betas": betas})


def test_vectors_are_not_decayed_and_frozen_weights_are_left_out() -> None:
    layer = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    layer[2].requires_grad_(requires_grad=False)
    own = optimizers.build_optimizer(Optimizer(weight_decay=0.1), layer.named_parameters())
    groups = [(len(group["params"]), group["weight_decay"]) for group in own.param_groups]
    assert groups == [(1, 0.1), (3, 0.0)]


def test_a_table_of_rates_is_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lazy device reads its rates from tables that follow one another."""
    monkeypatch.setattr(optimizers, "TABLE_STEPS", 3)
    settings = Optimizer(learning_rate=0.5, schedule=Schedule(kind="cosine", warmup_steps=2))
    rates = {
        lazy: optimizers.LRSchedule(settings, 9, torch.device("cpu"), lazy=lazy)
        for lazy in (False, True)
    }
    for start in (0, 4):
        for each in rates.values():
            each.seek(start)
        for step in range(start, 9):
            expected = optimizers.learning_rate(0.5, settings.schedule, step, 9)
            assert rates[False].next() == expected
            assert float(rates[True].next()) == pytest.approx(expected)
    rates[True].seek(-1)
    assert 0 < float(rates[True].next()) < 1e-20


def test_weights_have_their_shares_of_the_learning_rate() -> None:
    layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    settings = Optimizer(shares={"0.": 0.5, "0.bias": 0.0}, weight_decay=0.1)
    own = optimizers.build_optimizer(settings, layers.named_parameters())
    optimizers.set_learning_rate(own, 0.2)
    found = {
        (group["lr"], group["weight_decay"]): len(group["params"]) for group in own.param_groups
    }
    assert found == {(0.2, 0.1): 1, (0.2, 0.0): 1, (0.1, 0.1): 1, (0.0, 0.0): 1}
    optimizers.check_lr_multipliers(settings, dict(layers.named_parameters()))
    wrong, names = Optimizer(shares={"modle.": 0.5}), list(dict(layers.named_parameters()))
    with pytest.raises(SettingsError, match=r"begins with 'modle\.'; names begin with 0\., 1\."):
        optimizers.check_lr_multipliers(wrong, names)


def test_a_process_that_owns_nothing_has_an_optimizer() -> None:
    own = optimizers.build_optimizer(Optimizer(), [])
    optimizers.prime_state(own)
    own.step()
    assert own.param_groups[0]["params"] == []
