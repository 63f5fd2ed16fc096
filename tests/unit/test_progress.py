"""Model FLOPs utilization against a peak that was measured on this machine."""

from __future__ import annotations

import pytest

from regauge.accelerators import ChipPeak
from regauge.training.metrics import MfuMeter

FLOPS = 10.0
"""FLOPs per token."""


class Device:
    """A device whose peak is measured again."""

    def __init__(self, *peaks: float) -> None:
        self.peaks = list(peaks)
        self.times = 0

    def clear_measurements(self) -> None:
        self.times += 1

    def chip_peak(self, precision: str) -> ChipPeak:
        return ChipPeak("a", {precision: self.peaks[self.times]}, "timed", is_measured=True)


def build_meter(device: Device, *, measured: bool = True) -> MfuMeter:
    meter = MfuMeter(device, "fp32", FLOPS, 2)  # type: ignore[arg-type]
    meter.chip = ChipPeak("a", {"fp32": device.peaks[0]}, "timed", is_measured=measured)
    return meter


def test_an_implausible_mfu_repeats_the_measurement_of_the_peak() -> None:
    device = Device(100.0, 250.0)
    run = build_meter(device)
    assert run.measure(10.0) == 0.5
    assert device.times == 0
    # 150 FLOP/s, of a peak that was 100 and is now 250.
    assert run.measure(30.0) == pytest.approx(0.6)
    assert device.times == 1
    assert run.chip.flops_per_second == {"fp32": 250.0}


def test_a_confirmed_peak_is_kept() -> None:
    device = Device(100.0, 90.0)
    run = build_meter(device)
    assert [run.measure(16.0) for _ in range(3)] == [0.8] * 3
    assert device.times == 1


def test_a_peak_from_a_data_sheet_is_not_measured() -> None:
    device = Device(100.0)
    assert build_meter(device, measured=False).measure(30.0) == 1.5
    assert device.times == 0
