"""What every accelerator must do on the machine where it is; elsewhere it must say why not."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from regauge import choices, config
from regauge.accelerators import (
    Accelerator,
    Availability,
    choose,
    require,
    survey,
)
from regauge.errors import SettingsError
from regauge.training.defaults import check_precision

KINDS = choices.names("accelerators")
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.half}
ERRORS = {"fp32": 1e-6, "tf32": 1e-3, "bf16": 5e-3, "fp16": 1e-3}
"""Relative to the largest value; a product of n terms is summed in fp32 at least."""


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.backends.cuda.matmul.fp32_precision
    yield
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.fp32_precision = precision


@pytest.fixture(params=KINDS)
def accelerator(request: pytest.FixtureRequest) -> Accelerator:
    found: Accelerator = choices.load("accelerators", request.param)()
    availability = found.available()
    if availability.fitness == 0:
        pytest.skip(f"not proved here: {request.param}: {availability.reason}")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_availability_is_told_with_its_reason_and_never_raised(kind: str) -> None:
    found = choices.load("accelerators", kind).available()
    assert isinstance(found, Availability)
    assert found.fitness >= 0
    assert found.reason
    if found.fitness == 0:
        with pytest.raises(SettingsError, match=f"'{kind}' is not usable here.*usable here: "):
            require(choices.load("accelerators", kind)())


def test_the_fittest_is_chosen() -> None:
    chosen, reason = choose()
    assert survey()[chosen.kind].fitness == max(found.fitness for found in survey().values())
    assert reason.startswith(f"{chosen.kind}: ")


def test_precisions_are_offered_fastest_first(accelerator: Accelerator) -> None:
    usable = accelerator.precisions()
    assert len(set(usable)) == len(usable) > 0
    assert set(usable) <= set(TYPES)
    assert "fp32" in usable
    assert not {"bf16", "fp16"} <= set(usable), "fp16 is for chips that have no bf16"
    assert check_precision(accelerator, "auto") == usable[0]
    rates = accelerator.rates()
    assert not rates or rates.keys() == set(usable)
    assert all(rate.flops_per_second > 0 for rate in rates.values())
    for name in TYPES:
        if name in usable:
            assert check_precision(accelerator, name) == name
        else:
            with pytest.raises(SettingsError, match=f"does not train in {name} here"):
                check_precision(accelerator, name)


def test_products_are_right_in_every_precision(accelerator: Accelerator) -> None:
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(96, 200, dtype=torch.float64, generator=draw) for _ in range(2))
    for name in accelerator.precisions():
        device = accelerator.claim(0, 1)
        accelerator.use(name)
        rounded = [value.to(TYPES[name]) for value in (left, right)]
        expected = rounded[0].double() @ rounded[1].double().T
        found = (rounded[0].to(device) @ rounded[1].to(device).T).double().cpu()
        error = float((found - expected).abs().max() / expected.abs().max())
        assert error < ERRORS[name], name


def test_reductions_are_right(accelerator: Accelerator) -> None:
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(50, 2000, generator=draw)
    device = accelerator.claim(0, 1)
    accelerator.use("fp32")
    here, exact = values.to(device), values.double()
    for name, found, expected in (
        ("sum", here.square().sum(), exact.square().sum()),
        ("rows", here.sum(1), exact.sum(1)),
        ("largest", here.amax(0), exact.amax(0)),
        ("softmax", here.softmax(1), exact.softmax(1)),
        ("norm", here.norm(), exact.norm()),
    ):
        error = (found.double().cpu() - expected).abs().max() / expected.abs().max()
        assert float(error) < 1e-5, name


def test_a_claimed_device_is_this_process_s(accelerator: Accelerator) -> None:
    device = accelerator.claim(0, 1)
    assert torch.get_num_threads() == 1
    assert torch.ones(2, device=device).device == torch.ones(2).to(device).device
    assert accelerator.count() >= 1
    assert accelerator.collectives() in dist.Backend.backend_list
    accelerator.synchronize()
    peak = accelerator.peak_memory_bytes()
    assert peak is None or peak > 0


def test_memory_is_told_in_bytes_and_shared_by_those_who_share_it(accelerator: Accelerator) -> None:
    alone, one_of_four = (accelerator.memory_bytes(count) for count in (1, 4))
    if alone is None or one_of_four is None:
        assert alone is one_of_four
        return
    peak = accelerator.peak_memory_bytes()
    assert 1 << 26 < one_of_four <= 1.2 * alone
    assert peak is not None


def test_what_is_not_known_of_a_chip_is_absent(accelerator: Accelerator) -> None:
    accelerator.claim(0, 1)
    for precision in accelerator.precisions():
        chip = accelerator.chip(precision)
        assert chip.name
        assert chip.source
        assert all(rate > 0 for rate in chip.flops_per_second.values())
        assert set(chip.flops_per_second) <= set(TYPES)
        assert (precision in chip.flops_per_second) == (chip.source != "unknown")


def test_a_wrapped_loader_gives_the_same_batches_on_the_device(accelerator: Accelerator) -> None:
    device = accelerator.claim(0, 1)
    host = [
        [{"a": torch.arange(4) + n, "b": torch.full((2, 3), float(m))} for m in range(2)]
        for n in range(5)
    ]
    found = list(accelerator.wrap_loader(iter(host), device))
    assert len(found) == 5
    for step, wanted in zip(found, host, strict=True):
        for batch, expected in zip(step, wanted, strict=True):
            assert batch.keys() == expected.keys()
            assert all(value.device.type == device.type for value in batch.values())
            assert all(batch[name].cpu().equal(value) for name, value in expected.items())


def test_a_wrapped_loader_can_be_left_and_tells_what_failed(accelerator: Accelerator) -> None:
    device, threads = accelerator.claim(0, 1), threading.active_count()

    def steps(count: int) -> Iterator[list[dict[str, torch.Tensor]]]:
        for number in range(count):
            yield [{"a": torch.full((2,), float(number))}]
        raise OSError("the disk is gone")

    left = accelerator.wrap_loader(steps(50), device)
    assert float(next(left)[0]["a"].sum()) == 0
    left.close()
    assert threading.active_count() == threads
    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        seen.extend(accelerator.wrap_loader(steps(3), device))
    assert [float(step[0]["a"][0]) for step in seen] == [0, 1, 2]


def test_eager_work_makes_no_graph_once_its_shapes_are_known(accelerator: Accelerator) -> None:
    device = accelerator.claim(0, 1)

    def step() -> None:
        value = torch.ones(8, 8, device=device, requires_grad=True)
        value.square().sum().backward()
        accelerator.end_microbatch()
        accelerator.end_step()

    for _ in range(3):
        step()
    known = accelerator.graphs_compiled()
    assert known >= 0
    for _ in range(3):
        step()
    assert accelerator.graphs_compiled() == known


def test_compiling_is_possible_or_the_obstacle_is_named(accelerator: Accelerator) -> None:
    obstacle = accelerator.obstacle_to_compiling()
    assert obstacle is None or obstacle
    assert accelerator.compile_backend()
    assert accelerator.features() == accelerator.features()


def test_settings_survive_the_run_file(accelerator: Accelerator) -> None:
    saved = accelerator.model_dump(mode="json")
    assert saved["kind"] in KINDS
    assert config.choose("accelerators", saved) == accelerator
