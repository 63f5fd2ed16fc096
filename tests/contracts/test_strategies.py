"""What every strategy must do, as far as one process shows it; tests/distributed has the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from regauge import config, registry
from regauge.processes import World
from regauge.strategies import Prepared, Site, Strategy

ALONE = World()
TYPES = [torch.float32, torch.bfloat16]


class Tiny(nn.Module):
    """Two blocks and a head; one weight is not trained and one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 2)
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = rows.to(self.head.weight.dtype) * self.frozen.to(self.head.weight.dtype)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        result: Tensor = self.head(hidden)
        return result.float()


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(params=registry.names("strategies"))
def strategy(request: pytest.FixtureRequest) -> Strategy:
    found: Strategy = registry.load("strategies", request.param)()
    obstacle = found.obstacle(ALONE, "adamw")
    if obstacle:
        pytest.skip(f"not proved here: {request.param}: {obstacle}")
    return found


@pytest.fixture
def prepare(strategy: Strategy) -> Callable[[torch.dtype], Prepared]:
    def prepared(dtype: torch.dtype) -> Prepared:
        module = tiny()
        site = Site(ALONE, torch.device("cpu"), dtype, tuple(module.layers))
        return strategy.prepare(module, site)

    return prepared


def rows(number: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


def accumulate(prepared: Prepared) -> None:
    for number in range(3):
        with prepared.accumulating(last=number == 2):
            prepared.module(rows(number)).square().sum().backward()


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def test_obstacles_are_words_or_nothing() -> None:
    for kind in registry.names("strategies"):
        found = registry.load("strategies", kind)()
        for size in (1, 2, 3, 4, 8):
            for optimizer in ("adamw", "sgd", "adafactor"):
                obstacle = found.obstacle(World(size=size), optimizer)
                assert obstacle is None or obstacle.strip()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_masters_are_the_weights_in_fp32_by_their_own_names(
    prepare: Callable[[torch.dtype], Prepared], dtype: torch.dtype
) -> None:
    prepared = prepare(dtype)
    expected = dict(tiny().named_parameters())
    masters = prepared.masters()
    assert masters.keys() == expected.keys()
    for name, value in expected.items():
        assert masters[name].dtype == torch.float32
        assert whole(masters[name].detach()).equal(value)
        assert prepared.whole(name).equal(value)
        assert prepared.whole(name).dtype == torch.float32


def test_gradients_are_the_sum_over_microbatches(
    prepare: Callable[[torch.dtype], Prepared],
) -> None:
    prepared, plain = prepare(torch.float32), tiny()
    accumulate(prepared)
    for number in range(3):
        plain(rows(number)).square().sum().backward()
    masters = prepared.masters()
    for name, value in plain.named_parameters():
        gradient = masters[name].grad
        if value.grad is None:
            assert gradient is None or not whole(gradient).any(), name
        else:
            assert gradient is not None
            torch.testing.assert_close(whole(gradient), value.grad, rtol=1e-6, atol=1e-7)
    used = [value.grad for value in plain.parameters() if value.grad is not None]
    norm = torch.stack([value.norm() for value in used]).norm()
    assert float(prepared.gradient_norm()) == pytest.approx(float(norm), rel=1e-6)
    prepared.scale_gradients(torch.tensor(0.5))
    assert float(prepared.gradient_norm()) == pytest.approx(float(norm) / 2, rel=1e-6)
    prepared.clear_gradients()
    accumulate(prepared)
    assert float(prepared.gradient_norm()) == pytest.approx(float(norm), rel=1e-6)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_published_step_is_what_computes(
    prepare: Callable[[torch.dtype], Prepared], dtype: torch.dtype
) -> None:
    prepared = prepare(dtype)
    optimizer = torch.optim.SGD(prepared.masters().values(), lr=0.1)
    before = prepared.whole("head.weight").clone()
    with torch.no_grad():
        first = prepared.module(rows(9)).clone()
    accumulate(prepared)
    optimizer.step()
    prepared.publish()
    prepared.clear_gradients()
    after = prepared.whole("head.weight")
    assert not after.equal(before)
    assert prepared.whole("frozen").equal(torch.ones(6))
    plain = tiny()
    plain.load_state_dict({name: prepared.whole(name) for name in prepared.masters()})
    with torch.no_grad():
        now = prepared.module(rows(9))
        expected = plain.to(dtype)(rows(9))
    assert not now.equal(first)
    torch.testing.assert_close(now, expected, rtol=1e-6, atol=1e-6)


def test_a_small_step_in_bf16_is_not_lost(prepare: Callable[[torch.dtype], Prepared]) -> None:
    """A thousandth of a weight is below the last bit of bf16, and above that of its master."""
    prepared = prepare(torch.bfloat16)
    before = prepared.whole("head.weight").clone()
    with torch.no_grad():
        for _ in range(8):
            for master in prepared.masters().values():
                master.mul_(1.001)
            prepared.publish()
    torch.testing.assert_close(prepared.whole("head.weight"), before * 1.001**8)


def test_settings_survive_the_run_file(strategy: Strategy) -> None:
    saved = strategy.model_dump(mode="json")
    assert saved["kind"] in registry.names("strategies")
    assert config.choose("strategies", saved) == strategy
