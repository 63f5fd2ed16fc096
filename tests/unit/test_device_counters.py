"""Counters of devices: a fake NVML, the files of the kernel, and counters that are never set."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from regauge.accelerators import _nvidia, open_device_counters
from regauge.accelerators.cpu import Cpu
from regauge.accelerators.cuda import Cuda
from regauge.supervision.health.vendors import COUNTERS, judge_counters, record_counters
from regauge.system.device_counters import DeviceCounters


class NVMLError(Exception):
    """The error of NVML, such as a counter that a GPU does not have."""


class Memory:
    """The memory of a GPU in bytes."""

    used, total = 30, 80


class Rates:
    """The utilization in percent."""

    gpu = 75


def raise_error(*_: Any) -> Any:
    raise NVMLError


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a library with two GPUs; the temperature of the second one is not supported."""
    module: Any = ModuleType("pynvml")
    module.NVMLError, module.NVML_TEMPERATURE_GPU = NVMLError, 0
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetCount = lambda: 2
    module.nvmlDeviceGetHandleByIndex = int
    module.nvmlDeviceGetUtilizationRates = lambda _: Rates
    module.nvmlDeviceGetMemoryInfo = lambda _: Memory
    module.nvmlDeviceGetPowerUsage = lambda _: 350_500
    module.nvmlDeviceGetTemperature = lambda gpu, _: raise_error() if gpu else 55
    module.nvmlDeviceGetHandleByUUID = lambda uuid: 0 if uuid == "GPU-1" else raise_error()
    module.nvmlDeviceGetTotalEnergyConsumption = lambda _: module.millijoules
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_counters_of_gpus_have_base_units(nvml: ModuleType) -> None:
    del nvml
    first, second = Cuda().open_counters()()
    assert first == DeviceCounters("0", 0.75, 30, 80, 350.5, 55)
    assert second == DeviceCounters("1", 0.75, 30, 80, 350.5, None)


def test_a_driver_that_does_not_answer_has_no_devices(
    nvml: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "nvmlInit", raise_error)
    assert Cuda().open_counters()() == ()


def test_the_energy_meter_of_a_gpu_starts_at_zero(nvml: Any) -> None:
    nvml.millijoules = 5_000
    meter = _nvidia.start_energy_meter("GPU-1")
    assert meter is not None
    nvml.millijoules = 7_500
    assert meter() == 2.5
    assert _nvidia.start_energy_meter("GPU-2") is None


def test_without_the_python_package_a_gpu_has_no_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert _nvidia.start_energy_meter("GPU-1") is None


def test_the_host_has_its_memory_and_utilization() -> None:
    with record_counters(Cpu()) as readings:
        while len(readings) < 3:
            sum(range(100_000))
    (counters,) = readings[-1]
    assert counters.device == "host"
    assert counters.utilization is not None
    assert 0 < counters.utilization <= 1
    assert counters.memory_total_bytes is not None
    assert counters.memory_used_bytes is not None
    assert 0 < counters.memory_used_bytes < counters.memory_total_bytes
    assert open_device_counters(Cpu())()[0].device == "host"


def test_a_counter_that_is_always_zero_or_empty_is_reported() -> None:
    readings = [
        (DeviceCounters("0", 0.0, 30, 80, 0.0), DeviceCounters("1", 0.0, 30, 80, 5.0, 40)),
        (DeviceCounters("0", 0.5, 30, 80, 0.0), DeviceCounters("1", 0.5, 30, 80, 5.0, 40)),
    ]
    first, second = judge_counters(readings)
    assert first.problem == "always 0: power_watts; empty: temperature_celsius"
    assert first.value == "utilization, memory_used_bytes, memory_total_bytes"
    assert (second.problem, second.value) == ("", ", ".join(COUNTERS))
    assert first.ok
    assert second.ok


def test_a_machine_without_counters_is_reported() -> None:
    (finding,) = judge_counters([(), ()])
    assert finding.value == "none: the vendor's library found no device"
