"""The contract of every accelerator on a machine that has it; others must state a reason."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from regauge import config
from regauge.accelerators import (
    Accelerator,
    Availability,
    check_available,
    choose,
    survey,
)
from regauge.system import choices
from regauge.system.errors import SettingsError
from regauge.training.defaults import check_precision

KINDS = choices.names("accelerators")
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.half}
ERRORS = {"fp32": 1e-6, "tf32": 1e-3, "bf16": 5e-3, "fp16": 1e-3}
"""Relative to the largest value; a product of n terms is summed in fp32 at least."""


@pytest.fixture(autouse=True)
def _restore_torch_settings() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.backends.cuda.matmul.fp32_precision
    cudnn = (torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    cudnn_precisions = [operations.fp32_precision for operations in cudnn]
    yield
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.fp32_precision = precision
    for operations, value in zip(cudnn, cudnn_precisions, strict=True):
        operations.fp32_precision = value


@pytest.fixture(params=KINDS)
def accelerator(request: pytest.FixtureRequest) -> Accelerator:
    accelerator: Accelerator = choices.load("accelerators", request.param)()
    availability = accelerator.available()
    if availability.fitness == 0:
        pytest.skip(f"not proved here: {request.param}: {availability.reason}")
    return accelerator


@pytest.mark.parametrize("kind", KINDS)
def test_availability_has_a_reason_and_never_raises(kind: str) -> None:
    availability = choices.load("accelerators", kind).available()
    assert isinstance(availability, Availability)
    assert availability.fitness >= 0
    assert availability.reason
    if availability.fitness == 0:
        with pytest.raises(SettingsError, match=f"'{kind}' is not usable here.*use one of: "):
            check_available(choices.load("accelerators", kind)())


def test_the_accelerator_with_the_highest_fitness_is_chosen() -> None:
    accelerator, reason = choose()
    fitness = {kind: availability.fitness for kind, availability in survey().items()}
    assert fitness[accelerator.kind] == max(fitness.values())
    assert reason.startswith(f"{accelerator.kind}: ")


def test_precisions_are_offered_fastest_first(accelerator: Accelerator) -> None:
    usable = accelerator.precisions()
    assert len(set(usable)) == len(usable) > 0
    assert set(usable) <= set(TYPES)
    assert "fp32" in usable
    assert not {"bf16", "fp16"} <= set(usable), "fp16 is only for chips without bf16"
    assert check_precision(accelerator, "auto") == usable[0]
    speeds = accelerator.precision_speeds()
    assert not speeds or speeds.keys() == set(usable)
    assert all(speed > 0 for speed in speeds.values())
    assert speeds.get("fp32", 1.0) == 1.0
    for name in TYPES:
        if name in usable:
            assert check_precision(accelerator, name) == name
        else:
            with pytest.raises(SettingsError, match=f"does not train in {name} here"):
                check_precision(accelerator, name)


def test_matrix_products_are_accurate_in_every_precision(accelerator: Accelerator) -> None:
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(96, 200, dtype=torch.float64, generator=draw) for _ in range(2))
    for name in accelerator.precisions():
        device = accelerator.claim(0, 1)
        accelerator.set_precision(name)
        rounded = [value.to(TYPES[name]) for value in (left, right)]
        expected = rounded[0].double() @ rounded[1].double().T
        product = (rounded[0].to(device) @ rounded[1].to(device).T).double().cpu()
        error = float((product - expected).abs().max() / expected.abs().max())
        assert error < ERRORS[name], name


def test_fp32_is_recorded_as_fp32(accelerator: Accelerator) -> None:
    """No setting of torch or of the vendor may round the factors of fp32 products."""
    accelerator.claim(0, 1)
    accelerator.set_precision("fp32")
    recorded = accelerator.fp32_settings()
    assert recorded
    assert set(recorded.values()) <= {"highest", "default", "ieee", "none", "bf16"}
    assert recorded.get("auto_cast", "none") == "none"


def test_reductions_are_accurate(accelerator: Accelerator) -> None:
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(50, 2000, generator=draw)
    device = accelerator.claim(0, 1)
    accelerator.set_precision("fp32")
    actual, exact = values.to(device), values.double()
    for name, result, expected in (
        ("sum", actual.square().sum(), exact.square().sum()),
        ("rows", actual.sum(1), exact.sum(1)),
        ("largest", actual.amax(0), exact.amax(0)),
        ("softmax", actual.softmax(1), exact.softmax(1)),
        ("norm", actual.norm(), exact.norm()),
    ):
        error = (result.double().cpu() - expected).abs().max() / expected.abs().max()
        assert float(error) < 1e-5, name


def test_a_claimed_device_is_the_default_device_of_its_type(accelerator: Accelerator) -> None:
    device = accelerator.claim(0, 1)
    assert torch.get_num_threads() == 1
    assert torch.ones(2, device=device).device == torch.ones(2).to(device).device
    assert accelerator.num_devices() >= 1
    assert accelerator.distributed_backend() in dist.Backend.backend_list
    accelerator.synchronize()
    peak = accelerator.peak_memory_bytes()
    assert peak is None or peak > 0


def test_memory_is_in_bytes_and_shared_by_the_processes(accelerator: Accelerator) -> None:
    total, quarter = (accelerator.memory_bytes(count) for count in (1, 4))
    if total is None or quarter is None:
        assert total is quarter
        return
    peak = accelerator.peak_memory_bytes()
    assert 1 << 26 < quarter <= 1.2 * total
    assert peak is not None


def test_unknown_peaks_are_absent(accelerator: Accelerator) -> None:
    accelerator.claim(0, 1)
    for precision in accelerator.precisions():
        chip = accelerator.chip_peak(precision)
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
    steps = list(accelerator.wrap_loader(iter(host), device))
    assert len(steps) == 5
    for step, host_step in zip(steps, host, strict=True):
        for batch, expected in zip(step, host_step, strict=True):
            assert batch.keys() == expected.keys()
            assert all(value.device.type == device.type for value in batch.values())
            assert all(batch[name].cpu().equal(value) for name, value in expected.items())


def test_a_wrapped_loader_can_be_closed_and_raises_the_error_of_the_source(
    accelerator: Accelerator,
) -> None:
    device, threads = accelerator.claim(0, 1), threading.active_count()

    def steps(count: int) -> Iterator[list[dict[str, torch.Tensor]]]:
        for number in range(count):
            yield [{"a": torch.full((2,), float(number))}]
        raise OSError("the disk is gone")

    loader = accelerator.wrap_loader(steps(50), device)
    assert float(next(loader)[0]["a"].sum()) == 0
    loader.close()
    assert threading.active_count() == threads
    received = []
    with pytest.raises(OSError, match="the disk is gone"):
        received.extend(accelerator.wrap_loader(steps(3), device))
    assert [float(step[0]["a"][0]) for step in received] == [0, 1, 2]


def test_eager_work_compiles_no_graph_after_the_first_steps(accelerator: Accelerator) -> None:
    device = accelerator.claim(0, 1)

    def step() -> None:
        value = torch.ones(8, 8, device=device, requires_grad=True)
        value.square().sum().backward()
        accelerator.end_microbatch()
        accelerator.end_step()

    for _ in range(3):
        step()
    num_graphs = accelerator.num_compiled_graphs()
    assert num_graphs >= 0
    for _ in range(3):
        step()
    assert accelerator.num_compiled_graphs() == num_graphs


def test_compilation_is_possible_or_has_an_obstacle(accelerator: Accelerator) -> None:
    obstacle = accelerator.compile_obstacle()
    assert obstacle is None or obstacle
    assert accelerator.compile_backend()
    assert accelerator.features() == accelerator.features()


def test_settings_survive_the_run_file(accelerator: Accelerator) -> None:
    saved = accelerator.model_dump(mode="json")
    assert saved["kind"] in KINDS
    assert config.parse_choice("accelerators", saved) == accelerator
