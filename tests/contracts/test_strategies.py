"""The contract of every strategy in one process; tests/distributed has several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.runs import ACCELERATOR
from regauge import config
from regauge.models.init_weights import InitialWeights
from regauge.models.tensors import bit_sum
from regauge.models.weight_shapes import ParamSpec
from regauge.system import choices
from regauge.system.processes import World
from regauge.training.strategies import Placement, ShardedModel, Strategy
from regauge.training.strategies._sharded import build_mesh

ONE_PROCESS = World()
DEVICE = choices.load("accelerators", ACCELERATOR)().claim(0, torch.get_num_threads())
TYPES = [torch.float32, torch.bfloat16]


class Tiny(nn.Module):
    """A model of two blocks and a head, with a frozen weight and an unused one."""

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


class Initialized(nn.Module):
    """A model of two blocks and a head, with modules that torch can initialize."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 2)


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(params=choices.names("strategies"))
def strategy(request: pytest.FixtureRequest) -> Strategy:
    strategy: Strategy = choices.load("strategies", request.param)()
    obstacle = strategy.obstacle(ONE_PROCESS, "adamw")
    if obstacle:
        pytest.skip(f"not proved here: {request.param}: {obstacle}")
    return strategy


@pytest.fixture
def prepare(strategy: Strategy) -> Callable[[torch.dtype], ShardedModel]:
    def prepare_tiny(dtype: torch.dtype) -> ShardedModel:
        module = tiny()
        placement = Placement(ONE_PROCESS, DEVICE, dtype, tuple(module.layers))
        return strategy.prepare(module, placement)

    return prepare_tiny


def rows(number: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


def accumulate(prepared: ShardedModel) -> None:
    for number in range(3):
        with prepared.backward_pass(is_last=number == 2):
            prepared.module(rows(number).to(DEVICE)).square().sum().backward()


def full_tensor(value: Tensor) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()


def test_an_obstacle_is_a_text_or_none() -> None:
    for kind in choices.names("strategies"):
        strategy = choices.load("strategies", kind)()
        for size in (1, 2, 3, 4, 8):
            for optimizer in ("adamw", "lamb", "sgd", "adafactor"):
                obstacle = strategy.obstacle(World(size=size), optimizer)
                assert obstacle is None or obstacle.strip()
            world = World(size=size)
            obstacles = {strategy.obstacle(world, name) for name in ("adamw", "lamb")}
            assert len(obstacles) == 1, "lamb can be sharded if adamw can"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_master_weights_are_in_fp32_and_have_unsharded_names(
    prepare: Callable[[torch.dtype], ShardedModel], dtype: torch.dtype
) -> None:
    prepared = prepare(dtype)
    expected = dict(tiny().named_parameters())
    masters = prepared.masters()
    assert masters.keys() == expected.keys() - {"frozen"}
    for name, value in expected.items():
        if name in masters:
            assert masters[name].dtype == torch.float32
            assert full_tensor(masters[name].detach()).equal(value)
        assert prepared.full_tensor(name).equal(value)
        assert prepared.full_tensor(name).dtype == torch.float32


def test_gradients_are_the_sum_over_microbatches(
    prepare: Callable[[torch.dtype], ShardedModel],
) -> None:
    prepared, plain = prepare(torch.float32), tiny()
    accumulate(prepared)
    for number in range(3):
        plain(rows(number)).square().sum().backward()
    masters = prepared.masters()
    for name, value in plain.named_parameters():
        gradient = masters[name].grad if name in masters else None
        if value.grad is None:
            assert gradient is None or not full_tensor(gradient).any(), name
        else:
            assert gradient is not None
            torch.testing.assert_close(full_tensor(gradient), value.grad, rtol=1e-6, atol=1e-7)
    used = [value.grad for value in plain.parameters() if value.grad is not None]
    norm = torch.stack([value.norm() for value in used]).norm()
    assert float(prepared.gradient_norm()) == pytest.approx(float(norm), rel=1e-6)
    prepared.scale_gradients(torch.tensor(0.5, device=DEVICE))
    assert float(prepared.gradient_norm()) == pytest.approx(float(norm) / 2, rel=1e-6)
    prepared.clear_gradients()
    accumulate(prepared)
    assert float(prepared.gradient_norm()) == pytest.approx(float(norm), rel=1e-6)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_synchronized_weights_are_used_by_the_next_forward_pass(
    prepare: Callable[[torch.dtype], ShardedModel], dtype: torch.dtype
) -> None:
    prepared = prepare(dtype)
    optimizer = torch.optim.SGD(prepared.masters().values(), lr=0.1)
    before = prepared.full_tensor("head.weight").clone()
    with torch.no_grad():
        first = prepared.module(rows(9).to(DEVICE)).cpu().clone()
    accumulate(prepared)
    optimizer.step()
    prepared.sync_weights()
    prepared.clear_gradients()
    after = prepared.full_tensor("head.weight")
    assert not after.equal(before)
    assert prepared.full_tensor("frozen").equal(torch.ones(6))
    plain = tiny()
    plain.load_state_dict(
        {name: prepared.full_tensor(name) for name, _ in plain.named_parameters()}
    )
    with torch.no_grad():
        output = prepared.module(rows(9).to(DEVICE)).cpu()
        expected = plain.to(dtype)(rows(9))
    assert not output.equal(first)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_frozen_weight_has_the_dtype_of_the_computation(
    prepare: Callable[[torch.dtype], ShardedModel], dtype: torch.dtype
) -> None:
    prepared = prepare(dtype)
    frozen = prepared.module.get_parameter("frozen")
    assert frozen.dtype == dtype
    trained = sum(value.numel() for value in tiny().parameters() if value.requires_grad)
    memory = prepared.memory()
    assert memory["gradients"] == 4 * trained
    assert memory["master_weights"] in (0, 4 * trained)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_memory_estimate_equals_the_memory(
    strategy: Strategy, prepare: Callable[[torch.dtype], ShardedModel], dtype: torch.dtype
) -> None:
    specs = {
        name: ParamSpec(tuple(value.shape), value.requires_grad)
        for name, value in tiny().named_parameters()
    }
    estimate = strategy.estimate_memory(specs, 1, dtype.itemsize)
    expected = {
        "weights": estimate.weights,
        "master_weights": estimate.master_weights,
        "gradients": estimate.gradients,
    }
    prepared = prepare(dtype)
    assert prepared.memory() == expected
    assert sorted(estimate.updated_shapes) == sorted(
        tuple(v.shape) for v in prepared.masters().values()
    )


def test_a_module_on_the_meta_device_gets_the_initial_weights(strategy: Strategy) -> None:
    with torch.device("meta"):
        empty, template = Initialized(), Initialized()
    weights = InitialWeights(template, 3, {})
    placement = Placement(ONE_PROCESS, DEVICE, torch.float32, tuple(empty.layers), weights=weights)
    prepared = strategy.prepare(empty, placement)
    expected = dict(weights)
    for name, _ in Initialized().named_parameters():
        value = prepared.full_tensor(name)
        assert value.equal(expected[name][:])
        assert weights.bit_sums[name] == int(bit_sum(value))
    assert prepared.full_tensor("head.weight").std() > 0


def test_a_group_of_one_process_has_the_backend_of_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default, torch would select that of the machine's GPU, also for a run on the CPU."""
    backends: list[str | None] = []
    start = dist.init_process_group

    def record(backend: str | None = None, **options: Any) -> None:
        backends.append(backend)
        start(backend, **options)

    monkeypatch.setattr(dist, "init_process_group", record)
    build_mesh(Placement(ONE_PROCESS, DEVICE, torch.float32, ()), (1,), ("shard",))
    assert backends == [dist.get_default_backend_for_device(DEVICE)]
    assert DEVICE.type != "cpu" or backends == ["gloo"]


def test_a_small_step_in_bf16_is_not_lost(prepare: Callable[[torch.dtype], ShardedModel]) -> None:
    """A thousandth of a weight is below the precision of bf16 and above that of its fp32 master."""
    prepared = prepare(torch.bfloat16)
    before = prepared.full_tensor("head.weight").clone()
    with torch.no_grad():
        for _ in range(8):
            for master in prepared.masters().values():
                master.mul_(1.001)
            prepared.sync_weights()
    torch.testing.assert_close(prepared.full_tensor("head.weight"), before * 1.001**8)


def test_settings_survive_the_run_file(strategy: Strategy) -> None:
    saved = strategy.model_dump(mode="json")
    assert saved["kind"] in choices.names("strategies")
    assert config.parse_choice("strategies", saved) == strategy
