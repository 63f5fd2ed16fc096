"""Energy meters: the counters of the kernel and of NVIDIA's driver."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from regauge.accelerators import _host_counters, _nvml


def write_zone(
    root: Path, folder_name: str, name: str, microjoules: int, max_microjoules: int = 1_000_000
) -> Path:
    """Write a powercap zone; return the file of its counter."""
    folder = root / folder_name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{max_microjoules}\n")
    file = folder / "energy_uj"
    file.write_text(f"{microjoules}\n")
    return file


def test_the_counters_of_packages_are_added_without_their_subzones(tmp_path: Path) -> None:
    first = write_zone(tmp_path, "rapl:0", "package-0", 100_000)
    write_zone(tmp_path, "rapl:0:0", "core", 50_000)
    second = write_zone(tmp_path, "rapl:1", "package-1", 200_000)
    (tmp_path / "rapl").mkdir()
    meter = _host_counters.start_energy_meter(tmp_path)
    assert meter is not None
    first.write_text("600000\n")
    second.write_text("450000\n")
    assert meter() == 0.75


def test_a_counter_restarts_after_its_largest_value(tmp_path: Path) -> None:
    file = write_zone(tmp_path, "rapl:0", "package-0", 999_000, max_microjoules=999_999)
    meter = _host_counters.start_energy_meter(tmp_path)
    assert meter is not None
    file.write_text("1000\n")
    assert meter() == 0.002


def test_without_counters_there_is_no_meter(tmp_path: Path) -> None:
    assert _host_counters.start_energy_meter(tmp_path / "none") is None


def test_one_unreadable_package_disables_the_meter(tmp_path: Path) -> None:
    write_zone(tmp_path, "rapl:0", "package-0", 5)
    write_zone(tmp_path, "rapl:1", "package-1", 5).write_text("denied")
    assert _host_counters.start_energy_meter(tmp_path) is None


class UnknownError(Exception):
    """The error of NVML."""


class Driver(SimpleNamespace):
    """A stand-in for NVML that returns the millijoules of one GPU."""

    NVMLError = UnknownError
    millijoules = 5_000

    def nvmlInit(self) -> None:  # noqa: N802 - the names of NVML
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-1":
            raise UnknownError
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, device: str) -> int:  # noqa: N802
        assert device == "GPU-1"
        return self.millijoules


def test_the_gpu_meter_starts_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    meter = _nvml.start_meter("GPU-1")
    assert meter is not None
    driver.millijoules = 7_500
    assert meter() == 2.5
    assert _nvml.start_meter("GPU-2") is None


def test_without_the_python_package_there_is_no_gpu_meter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert _nvml.start_meter("GPU-1") is None
