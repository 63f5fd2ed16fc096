"""What counts as far above the usual, what a lazy device does of it, and who holds others up."""

from __future__ import annotations

import math

import pytest
import torch

from regauge.errors import NoProgressError, RollBackError
from regauge.processes import World
from regauge.training import straggler
from regauge.training.guards import LEARNING_STEPS, Guard, detect_spike
from regauge.training.settings import Guarding
from regauge.training.straggler import StragglerDetector

CPU = torch.device("cpu")


def spikes(losses: list[float], norms: list[float], deviations: float = 8.0) -> list[int]:
    usual, found = torch.zeros(5), []
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        flag, usual = detect_spike(usual, torch.tensor([loss, math.log(norm)]), deviations)
        if flag:
            found.append(step)
    return found


def noisy(count: int, spread: float, seed: int = 0) -> list[float]:
    draw = torch.Generator().manual_seed(seed)
    return (1 + spread * torch.randn(count, generator=draw)).tolist()


def test_noise_is_no_spike() -> None:
    falling = [9 * math.exp(-step / 100) + value for step, value in enumerate(noisy(500, 0.1))]
    norms = [math.exp(value - 1) for value in noisy(500, 0.5, seed=1)]
    assert spikes(falling, norms) == []


@pytest.mark.parametrize(("loss", "norm"), [(3.0, 1.0), (1.0, 50.0)])
def test_a_spike_of_either_is_found_at_its_step(loss: float, norm: float) -> None:
    losses, norms = noisy(60, 0.05), [abs(value) for value in noisy(60, 0.1, seed=1)]
    losses[40], norms[40] = losses[40] * loss, norms[40] * norm
    assert spikes(losses, norms) == [40]


def test_a_spike_does_not_hide_the_next() -> None:
    losses = noisy(60, 0.05)
    losses[40] = losses[43] = 10.0
    assert spikes(losses, [1.0] * 60) == [40, 43]


def test_nothing_is_a_spike_before_the_usual_is_known() -> None:
    losses = [1.0] * LEARNING_STEPS
    losses[-1] = 100.0
    assert spikes(losses, [1.0] * LEARNING_STEPS) == []


def test_a_new_level_becomes_usual() -> None:
    found = spikes(noisy(40, 0.05) + [3 * value for value in noisy(400, 0.05, seed=1)], [1.0] * 440)
    assert found[0] == 40
    assert found[-1] < 300


def test_what_is_not_finite_is_not_learned_from() -> None:
    usual = torch.tensor([20.0, 1.0, 0.0, 0.1, 0.1])
    flag, after = detect_spike(usual, torch.tensor([math.nan, math.inf]), 8.0)
    assert not flag
    assert torch.equal(after, usual)


def guard(**settings: object) -> tuple[Guard, torch.nn.Parameter]:
    value = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([value], capturable=True)
    return Guard(Guarding.model_validate(settings), optimizer, CPU, lazy=True), value


def test_a_lazy_device_updates_by_nothing() -> None:
    one, value = guard()
    value.grad = torch.full((4,), math.nan)
    assert one.should_update(value.grad.norm(), torch.ones(2))
    rate = one.masked_lr(torch.tensor(0.1))
    assert float(rate) < 1e-20
    assert torch.equal(value.grad, torch.zeros(4))


def test_a_good_step_keeps_its_gradient_and_rate() -> None:
    one, value = guard()
    value.grad = torch.ones(4)
    assert one.should_update(value.grad.norm(), torch.ones(2))
    assert float(one.masked_lr(torch.tensor(0.5))) == 0.5
    assert torch.equal(value.grad, torch.ones(4))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"not_finite": "stop"}, NoProgressError),
        ({"not_finite": "roll-back"}, RollBackError),
        ({"skipped_in_a_row": 1}, RollBackError),
    ],
)
def test_a_bad_step_does_what_the_settings_ask(
    settings: dict[str, object], error: type[Exception]
) -> None:
    one, _ = guard(**settings)
    one.should_update(torch.tensor(math.nan), torch.ones(2))
    with pytest.raises(error) as found:
        one.raise_if_needed(7)
    assert type(found.value) is error


def test_steps_in_a_row_are_counted_over_looks() -> None:
    one, _ = guard(skipped_in_a_row=3)
    for step in (1, 2):
        one.should_update(torch.tensor(math.nan), torch.ones(2))
        one.raise_if_needed(step)
    one.should_update(torch.tensor(1.0), torch.ones(2))
    for step in (4, 5):
        one.should_update(torch.tensor(math.inf), torch.ones(2))
        one.raise_if_needed(step)
    one.should_update(torch.tensor(math.nan), torch.ones(2))
    with pytest.raises(RollBackError, match="3 steps in a row were skipped, up to step 6"):
        one.raise_if_needed(6)


def test_the_slowest_is_named_in_the_second_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(straggler.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(
        straggler, "all_reduce_sum", lambda own: own + torch.tensor([0.1, 0.0, 0.1])
    )
    pace = StragglerDetector(World(rank=1, size=3), CPU)
    told = []
    for _ in range(3):
        pace.before_batches(0)
        pace.before_collective()
        pace.before_collective()
        told.append(pace.ledger_fields()["slowest"])
    assert told == [None, {"rank": 1, "seconds": 0.9}, {"rank": 1, "seconds": 0.9}]


def test_who_is_late_in_turns_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(straggler.time, "perf_counter", lambda: float(next(clock)))
    late = iter([[0.0, 2.0], [2.0, 0.0], [0.0, 2.0]])
    monkeypatch.setattr(straggler, "all_reduce_sum", lambda _: torch.tensor(next(late)))
    pace = StragglerDetector(World(rank=0, size=2), CPU)
    for _ in range(3):
        pace.before_batches(0)
        pace.before_collective()
        assert pace.ledger_fields() == {"slowest": None}
