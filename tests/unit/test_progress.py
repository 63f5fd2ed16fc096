"""The share of the peak that a run achieves, where the peak was timed on this machine."""

from __future__ import annotations

import pytest

from regauge.accelerators import Chip
from regauge.training.metrics import MfuMeter

FLOPS = 10.0
"""Of a token."""


class Device:
    """One whose peak is timed again."""

    def __init__(self, *peaks: float) -> None:
        self.peaks = list(peaks)
        self.times = 0

    def precisions(self) -> tuple[str, ...]:
        return ("fp32",)

    def measure_again(self) -> None:
        self.times += 1

    def chip(self, precision: str) -> Chip:
        return Chip("a", {precision: self.peaks[self.times]}, "timed", measured=True)


def meter(device: Device, *, measured: bool = True) -> MfuMeter:
    made = MfuMeter(device, "fp32", FLOPS, 2)  # type: ignore[arg-type]
    made.chip = Chip("a", {"fp32": device.peaks[0]}, "timed", measured=measured)
    return made


def test_a_peak_that_a_run_comes_too_near_to_is_timed_again() -> None:
    device = Device(100.0, 250.0)
    run = meter(device)
    assert run.measure(10.0) == 0.5
    assert device.times == 0
    assert run.measure(30.0) == pytest.approx(0.6)  # 150 of what were 100, and are 250
    assert device.times == 1
    assert run.chip.flops_per_second == {"fp32": 250.0}


def test_one_that_is_no_higher_is_believed() -> None:
    device = Device(100.0, 90.0)
    run = meter(device)
    assert [run.measure(16.0) for _ in range(3)] == [0.8] * 3
    assert device.times == 1


def test_a_data_sheets_is_not_timed() -> None:
    device = Device(100.0)
    assert meter(device, measured=False).measure(30.0) == 1.5
    assert device.times == 0
