"""Guards: spike detection, skipped updates on lazy devices, and straggler detection."""

from __future__ import annotations

import math

import pytest
import torch

from regauge.system.errors import NoProgressError, RollbackError
from regauge.system.processes import World
from regauge.training.guards import MIN_STATS_STEPS, Guard, detect_spike
from regauge.training.profile import straggler
from regauge.training.profile.straggler import StragglerDetector
from regauge.training.settings import GuardSettings

CPU = torch.device("cpu")


def find_spikes(losses: list[float], norms: list[float], deviations: float = 8.0) -> list[int]:
    usual, spike_steps = torch.zeros(5), []
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        flag, usual = detect_spike(usual, torch.tensor([loss, math.log(norm)]), deviations)
        if flag:
            spike_steps.append(step)
    return spike_steps


def draw_noise(count: int, spread: float, seed: int = 0) -> list[float]:
    draw = torch.Generator().manual_seed(seed)
    return (1 + spread * torch.randn(count, generator=draw)).tolist()


def test_noise_is_not_a_spike() -> None:
    falling = [9 * math.exp(-step / 100) + value for step, value in enumerate(draw_noise(500, 0.1))]
    norms = [math.exp(value - 1) for value in draw_noise(500, 0.5, seed=1)]
    assert find_spikes(falling, norms) == []


@pytest.mark.parametrize(("loss", "norm"), [(3.0, 1.0), (1.0, 50.0)])
def test_a_spike_of_loss_or_norm_is_detected_at_its_step(loss: float, norm: float) -> None:
    losses, norms = draw_noise(60, 0.05), [abs(value) for value in draw_noise(60, 0.1, seed=1)]
    losses[40], norms[40] = losses[40] * loss, norms[40] * norm
    assert find_spikes(losses, norms) == [40]


def test_a_spike_does_not_hide_the_next_one() -> None:
    losses = draw_noise(60, 0.05)
    losses[40] = losses[43] = 10.0
    assert find_spikes(losses, [1.0] * 60) == [40, 43]


def test_the_first_steps_are_never_spikes() -> None:
    losses = [1.0] * MIN_STATS_STEPS
    losses[-1] = 100.0
    assert find_spikes(losses, [1.0] * MIN_STATS_STEPS) == []


def test_running_statistics_follow_a_new_level() -> None:
    losses = draw_noise(40, 0.05) + [3 * value for value in draw_noise(400, 0.05, seed=1)]
    spike_steps = find_spikes(losses, [1.0] * 440)
    assert spike_steps[0] == 40
    assert spike_steps[-1] < 300


def test_non_finite_values_do_not_change_the_running_statistics() -> None:
    usual = torch.tensor([20.0, 1.0, 0.0, 0.1, 0.1])
    flag, after = detect_spike(usual, torch.tensor([math.nan, math.inf]), 8.0)
    assert not flag
    assert torch.equal(after, usual)


def build_guard(**settings: object) -> tuple[Guard, torch.nn.Parameter]:
    value = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([value], capturable=True)
    return Guard(GuardSettings.model_validate(settings), optimizer, CPU, lazy=True), value


@pytest.mark.parametrize(("gradient", "kept"), [(math.nan, 0.0), (1.0, 1.0)])
def test_a_bad_step_on_a_lazy_device_has_no_gradient_and_no_learning_rate(
    gradient: float, kept: float
) -> None:
    one, value = build_guard()
    value.grad = torch.full((4,), gradient)
    assert one.should_update(value.grad.norm(), torch.ones(2))
    assert float(one.masked_lr(torch.tensor(0.5))) == pytest.approx(0.5 * kept, abs=1e-20)
    assert torch.equal(value.grad, torch.full((4,), kept))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"not_finite": "stop"}, NoProgressError),
        ({"not_finite": "rollback"}, RollbackError),
        ({"max_consecutive_skips": 1}, RollbackError),
    ],
)
def test_a_bad_step_raises_the_configured_error(
    settings: dict[str, object], error: type[Exception]
) -> None:
    one, _ = build_guard(**settings)
    one.should_update(torch.tensor(math.nan), torch.ones(2))
    with pytest.raises(error) as raised:
        one.raise_if_needed(7)
    assert type(raised.value) is error


def test_consecutive_skips_are_counted_across_log_lines() -> None:
    one, _ = build_guard(max_consecutive_skips=3)
    for step in (1, 2):
        one.should_update(torch.tensor(math.nan), torch.ones(2))
        one.raise_if_needed(step)
    one.should_update(torch.tensor(1.0), torch.ones(2))
    for step in (4, 5):
        one.should_update(torch.tensor(math.inf), torch.ones(2))
        one.raise_if_needed(step)
    assert one.num_skipped == 4
    one.should_update(torch.tensor(math.nan), torch.ones(2))
    with pytest.raises(RollbackError, match="3 consecutive steps were skipped, up to step 6"):
        one.raise_if_needed(6)


def test_a_straggler_is_reported_in_the_second_ledger_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(straggler.time, "perf_counter", lambda: float(next(clock)))
    others = torch.tensor([0.1, 0.0, 0.1])
    monkeypatch.setattr(straggler, "all_reduce_sum", lambda seconds: seconds + others)
    pace = StragglerDetector(World(rank=1, size=3), CPU)
    reports = []
    for _ in range(3):
        pace.before_batches(0)
        pace.before_collective()
        pace.before_collective()
        reports.append(pace.ledger_fields()["straggler"])
    assert reports == [None, *2 * [{"rank": 1, "delay_seconds": 0.9}]]


def test_alternating_late_ranks_are_not_stragglers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(straggler.time, "perf_counter", lambda: float(next(clock)))
    late = iter([[0.0, 2.0], [2.0, 0.0], [0.0, 2.0]])
    monkeypatch.setattr(straggler, "all_reduce_sum", lambda _: torch.tensor(next(late)))
    pace = StragglerDetector(World(rank=0, size=2), CPU)
    for _ in range(3):
        pace.before_batches(0)
        pace.before_collective()
        assert pace.ledger_fields() == {"straggler": None}
