"""The counters of Gaudi: Intel's Python package over a library that is compiled from hlml.c."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from regauge.accelerators import _hlml, open_device_counters
from regauge.accelerators.gaudi import Gaudi
from regauge.supervision.health.vendors import judge_counters, record_counters
from regauge.system.device_counters import DeviceCounters, DeviceErrors

SOURCE = Path(__file__).parents[1] / "gaudi" / "hlml.c"
NOT_SUPPORTED, DRIVER_NOT_LOADED, LOST = 3, 9, 15
"""Codes of HLML_RETURN."""
GIB = 2**30


class Device(ctypes.Structure):
    """The counters of a device in the library, in the library's units."""

    _fields_: ClassVar = [
        ("busy_percent", ctypes.c_uint),
        ("milliwatts", ctypes.c_uint),
        ("celsius", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("total_bytes", ctypes.c_ulonglong),
        ("ecc_errors", ctypes.c_longlong),
    ]


class Library:
    """The compiled library, and its functions for tests."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.get_device.restype = ctypes.POINTER(Device)

    def reset(self, num_devices: int) -> None:
        self._library.reset(num_devices)

    def set_counters(self, index: int, *counters: int) -> None:
        device = Device(*counters)
        self._library.get_device(index)[0] = device

    def set_ecc_errors(self, index: int, count: int) -> None:
        self._library.get_device(index)[0].ecc_errors = count

    def fail(self, function: str, code: int) -> None:
        self._library.fail(function.encode(), code)


@pytest.fixture(scope="module")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hlml") / "libhlml.so"
    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, str(SOURCE), "-o", str(path)], check=True)
    return path


@pytest.fixture
def library(library_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """Let the package load the compiled library, with two devices."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from pyhlml.hlml_lib import LibHLML
    monkeypatch.setattr(LibHLML.__init__, "__defaults__", (str(library_path),))
    monkeypatch.setattr(_hlml, "LIBRARY", library_path)
    library = Library(library_path)
    library.reset(2)
    library.set_counters(0, 75, 350_500, 55, 30 * GIB, 96 * GIB)
    library.set_counters(1, 0, 90_000, 31, 0, 96 * GIB)
    yield library
    library.reset(0)


def test_counters_have_base_units_and_follow_the_device(library: Library) -> None:
    read = Gaudi().open_counters()
    first, second = read()
    assert first == DeviceCounters("0", 0.75, 30 * GIB, 96 * GIB, 350.5, 55)
    assert second == DeviceCounters("1", 0.0, 0, 96 * GIB, 90.0, 31)
    library.set_counters(1, 100, 600_000, 78, 95 * GIB, 96 * GIB)
    assert read() == (first, DeviceCounters("1", 1.0, 95 * GIB, 96 * GIB, 600.0, 78))


@pytest.mark.parametrize(
    ("function", "counters"),
    [
        ("hlml_device_get_utilization_rates", {"utilization"}),
        ("hlml_device_get_memory_info", {"memory_used_bytes", "memory_total_bytes"}),
        ("hlml_device_get_power_usage", {"power_watts"}),
        ("hlml_device_get_temperature", {"temperature_celsius"}),
    ],
)
@pytest.mark.parametrize("code", [NOT_SUPPORTED, LOST])
def test_a_failing_call_leaves_its_counters_empty(
    function: str, counters: set[str], code: int, library: Library
) -> None:
    read = Gaudi().open_counters()
    library.fail(function, code)
    for device in read():
        assert {name for name, value in vars(device).items() if value is None} == counters


@pytest.mark.parametrize(
    "function", ["hlml_init", "hlml_device_get_count", "hlml_device_get_handle_by_index"]
)
def test_a_driver_that_does_not_answer_has_no_devices(function: str, library: Library) -> None:
    library.fail(function, DRIVER_NOT_LOADED)
    assert Gaudi().open_counters()() == ()


def test_a_machine_without_devices_has_no_counters(library: Library) -> None:
    library.reset(0)
    assert Gaudi().open_counters()() == ()


def test_a_missing_library_or_package_is_silent(
    library: Library, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    del library
    with monkeypatch.context() as patch:
        patch.setattr(_hlml, "LIBRARY", Path("/none/libhlml.so"))
        assert Gaudi().open_counters()() == ()
    monkeypatch.setitem(sys.modules, "pyhlml", None)
    assert Gaudi().open_counters()() == ()
    assert capfd.readouterr().out == ""


def test_uncorrected_memory_errors_are_counted_from_the_start(library: Library) -> None:
    library.set_ecc_errors(1, 5)
    read = Gaudi().open_errors()
    assert read() == (DeviceErrors("0"), DeviceErrors("1"))
    library.set_ecc_errors(1, 7)
    assert read() == (DeviceErrors("0"), DeviceErrors("1", 2))
    library.fail("hlml_device_get_total_ecc_errors", LOST)
    assert read()[1].count == 2
    read_late = Gaudi().open_errors()
    library.fail("", 0)
    library.set_ecc_errors(1, 8)
    assert [errors.count for errors in read_late()] == [0, 0]
    library.set_ecc_errors(1, 9)
    assert [errors.count for errors in read_late()] == [0, 1]
    assert [errors.count for errors in read()] == [0, 4]
    library.reset(0)
    assert Gaudi().open_errors()() == ()


def test_doctor_and_monitor_read_the_counters(library: Library) -> None:
    del library
    assert [counters.device for counters in open_device_counters(Gaudi())()] == ["0", "1"]
    with record_counters(Gaudi()) as readings:
        while len(readings) < 2:
            sum(range(100_000))
    first, second = judge_counters(readings)
    assert not first.problem
    assert second.problem == "always 0: utilization, memory_used_bytes"
