"""The simulated device of tests/simulated: separate memory, and no silent use of the CPU.

`make test-simulated` runs the contracts on it. Other runs of the tests do not have the device.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed import datasets, jobs
from distributed.host_operations import HostOperationRefusal, refuse_host_operations
from distributed.runs import settings
from regauge import accelerators
from regauge.accelerators import is_cpu_only_torch
from regauge.system import processes
from regauge.training.gradients import GradientComputer
from regauge.training.run import attempt

DEVICE = torch.accelerator.current_accelerator()
pytestmark = pytest.mark.skipif(
    DEVICE is None or DEVICE.type != "sim",
    reason="not proved here: no simulated device (make test-simulated has one)",
)


@pytest.fixture
def device() -> torch.device:
    return torch.device("sim", 0)


def test_an_out_of_tree_device_is_preferred_to_the_cpu() -> None:
    assert is_cpu_only_torch()
    accelerator, reason = accelerators.choose()
    assert accelerator.kind == "generic"
    assert "'sim'" in reason


def test_the_processor_cannot_reach_the_memory_of_the_device() -> None:
    read = "import torch, ctypes; value = torch.ones(4, device='sim');"
    read += "print(value.sum().item(), flush=True); ctypes.string_at(value.data_ptr(), 4)"
    done = subprocess.run(
        [sys.executable, "-c", read], capture_output=True, encoding="utf-8", check=False
    )
    assert done.stdout == "4.0\n"
    assert done.returncode == -signal.SIGSEGV


def test_an_operation_on_tensors_of_both_is_refused(device: torch.device) -> None:
    values, table = torch.ones(4, device=device), torch.ones(4)
    for compute in (
        lambda: values + table,
        lambda: torch.nn.functional.linear(values, torch.ones(2, 4)),
        lambda: values.copy_(table).index_select(0, torch.arange(2)),
        lambda: torch.cat([values, table]),
    ):
        with pytest.raises(RuntimeError, match=r"device"):
            compute()
    assert (values + torch.tensor(1.0)).sum().item() == 8, "a number of the CPU is allowed"


def test_an_operation_on_two_devices_is_refused(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"device"):
        torch.ones(4, device=device) @ torch.ones(4, device=torch.device("sim", 1))


def test_results_stay_on_the_device_with_their_gradients(device: torch.device) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.LayerNorm(6)).to(device)
    kernels = torch.get_device_module("sim").num_kernels()
    output = module(torch.ones(3, 6, device=device))
    output.square().mean().backward()
    assert all(value.grad is not None for value in module.parameters())
    assert {output.device, *(value.grad.device for value in module.parameters())} == {device}  # type: ignore[union-attr]
    assert torch.get_device_module("sim").num_kernels() > kernels + 8


def test_views_share_memory_and_storages_grow(device: torch.device) -> None:
    values = torch.zeros(2, 6, device=device)
    values.T[1:3].view(-1, 2).fill_(1)
    assert values.cpu().sum() == 4
    values.untyped_storage().resize_(0)
    values.untyped_storage().resize_(96)
    assert values.resize_(4, 6).fill_(2).sum().item() == 48


def test_the_generator_of_the_device_is_separate(device: torch.device) -> None:
    torch.manual_seed(3)
    state, host = torch.sim.get_rng_state(), torch.rand(2)  # type: ignore[attr-defined]
    first = torch.rand(4, device=device)
    torch.manual_seed(3)
    assert torch.rand(2).equal(host)
    torch.sim.set_rng_state(state)  # type: ignore[attr-defined]
    assert torch.rand(4, device=device).equal(first)
    generator = torch.Generator(device).manual_seed(3)
    assert torch.rand(4, device=device, generator=generator).equal(first)
    with pytest.raises(RuntimeError, match=r"generator|device"):
        torch.rand(4, device=device, generator=torch.Generator())


def test_streams_and_events_have_an_order(device: torch.device) -> None:
    before = torch.accelerator.current_stream()
    other = torch.Stream(device)
    with torch.sim.stream(other):  # type: ignore[attr-defined]
        assert torch.accelerator.current_stream() == other != before
        start = torch.Event(device, enable_timing=True)
        start.record()
    assert torch.accelerator.current_stream() == before
    end = torch.Event(device, enable_timing=True)
    end.record()
    before.wait_event(start)
    end.synchronize()
    assert start.elapsed_time(end) >= 0


def test_freed_memory_is_counted(device: torch.device) -> None:
    before = torch.accelerator.memory_allocated()
    values = torch.ones(1024, device=device)
    assert torch.accelerator.memory_allocated() == before + 4096
    del values
    assert torch.accelerator.memory_allocated() == before


@pytest.mark.timeout(300)
def test_a_metric_of_the_cpu_joins_those_of_the_device(tmp_path: Path) -> None:
    """The correlations of `similarity` are computed on the CPU, its loss on the device."""
    data = datasets.write_pairs(tmp_path / "data")
    changes = {"accelerator": "generic", "stop": {"steps": 2}}
    lines = jobs.train(str(tmp_path / "run"), str(data), "similarity", changes)
    assert any("heldout/spearman" in line for line in lines)


@pytest.mark.timeout(300)
def test_a_step_that_computes_on_the_cpu_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = datasets.write_packed(tmp_path / "data")
    changes = {"accelerator": "generic", "stop": {"steps": 2}}
    lines = jobs.train(str(tmp_path / "run"), str(data), "mlm", changes)
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2]
    accumulate = GradientComputer.accumulate_gradients

    def compute_on_host(self: GradientComputer, *arguments: object) -> torch.Tensor:
        return accumulate(self, *arguments).cpu().expand(2).square().mean().to("sim")  # type: ignore[arg-type]

    monkeypatch.setattr(GradientComputer, "accumulate_gradients", compute_on_host)
    run = settings(tmp_path / "host", data, "mlm", **changes)
    with refuse_host_operations(), pytest.raises(AssertionError, match="on the CPU"):
        attempt(run, processes.World())
    assert HostOperationRefusal.num_operations > 0
