"""Joules out of the counters of a kernel and of a driver, or none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from regauge.accelerators import _nvml, _powercap


def zone(root: Path, name: str, called: str, microjoules: int, most: int = 1_000_000) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{called}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    file = folder / "energy_uj"
    file.write_text(f"{microjoules}\n")
    return file


def test_packages_are_added_and_their_parts_are_not(tmp_path: Path) -> None:
    first = zone(tmp_path, "rapl:0", "package-0", 100_000)
    zone(tmp_path, "rapl:0:0", "core", 50_000)
    second = zone(tmp_path, "rapl:1", "package-1", 200_000)
    (tmp_path / "rapl").mkdir()
    meter = _powercap.meter(tmp_path)
    assert meter is not None
    first.write_text("600000\n")
    second.write_text("450000\n")
    assert meter() == 0.75


def test_a_counter_begins_again_beyond_its_largest_value(tmp_path: Path) -> None:
    file = zone(tmp_path, "rapl:0", "package-0", 999_000, most=999_999)
    meter = _powercap.meter(tmp_path)
    assert meter is not None
    file.write_text("1000\n")
    assert meter() == 0.002


def test_without_counters_nothing_is_known(tmp_path: Path) -> None:
    assert _powercap.meter(tmp_path / "none") is None


def test_a_package_that_cannot_be_read_makes_all_unknown(tmp_path: Path) -> None:
    zone(tmp_path, "rapl:0", "package-0", 5)
    zone(tmp_path, "rapl:1", "package-1", 5).write_text("denied")
    assert _powercap.meter(tmp_path) is None


class UnknownError(Exception):
    """What NVML raises."""


class Driver(SimpleNamespace):
    """Says a GPU's millijoules as NVML does."""

    NVMLError = UnknownError
    millijoules = 5_000

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's own names
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-1":
            raise UnknownError
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, device: str) -> int:  # noqa: N802
        assert device == "GPU-1"
        return self.millijoules


def test_a_driver_counts_from_when_it_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    meter = _nvml.meter("GPU-1")
    assert meter is not None
    driver.millijoules = 7_500
    assert meter() == 2.5
    assert _nvml.meter("GPU-2") is None


def test_without_the_package_of_the_driver_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert _nvml.meter("GPU-1") is None
