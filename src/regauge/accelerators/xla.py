"""Google TPUs through PyTorch/XLA, and the CPU as an XLA device."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import ClassVar, Literal

from regauge.accelerators import Availability, ChipPeak, Precision
from regauge.accelerators._tpu_chips import count_tpu_chips
from regauge.accelerators._xla import PLATFORM, XlaDevice, torch_xla_obstacle
from regauge.system.units import TERA

PEAKS = {"v4": 275 * TERA, "v5e": 197 * TERA, "v5p": 459 * TERA, "v6e": 918 * TERA}
"""Dense bf16 peaks of one chip (cloud.google.com/tpu/docs, system architecture of each version)."""


class Xla(XlaDevice):
    """One TPU chip per process, or the CPU."""

    chip_vendors: ClassVar[tuple[str, ...]] = ("Google", "CPU")

    env_prefixes: ClassVar[tuple[str, ...]] = (*XlaDevice.env_prefixes, "TPU_", "LIBTPU_")

    device: Literal["auto", "cpu", "tpu"] = "auto"
    """Device that XLA compiles for; `auto` reads PJRT_DEVICE, else uses a TPU, else the CPU."""

    @classmethod
    def available(cls) -> Availability:
        if obstacle := torch_xla_obstacle():
            return Availability(0, obstacle)
        if os.environ.get(PLATFORM, "").upper() == "TPU" or count_tpu_chips():
            return Availability(90, f"torch_xla {version('torch_xla')} finds TPU chips")
        return Availability(1, f"torch_xla {version('torch_xla')} compiles for the CPU")

    def platform(self) -> str:
        if self.device == "auto":
            return os.environ.get(PLATFORM) or ("TPU" if count_tpu_chips() else "CPU")
        return self.device.upper()

    def precisions(self) -> tuple[Precision, ...]:
        return ("bf16", "fp32") if self.platform() == "TPU" else ("fp32", "bf16")

    def set_precision(self, precision: Precision) -> None:
        """Compute fp32 products in fp32; by default a TPU rounds their inputs to bf16."""
        if self.platform() == "TPU":
            from torch_xla import backends

            backends.set_mat_mul_precision("highest" if precision == "fp32" else "default")

    def fp32_settings(self) -> dict[str, str]:
        from torch_xla import backends

        return {"mat_mul_precision": str(backends.get_mat_mul_precision())}

    def chip_peak(self, precision: Precision) -> ChipPeak:
        if self.platform() == "CPU":
            return ChipPeak("XLA on the CPU")
        from torch_xla._internal import tpu

        name = f"v{tpu.version()}"
        peak = PEAKS.get(name)
        if peak is None or precision != "bf16":
            return ChipPeak(f"TPU {name}")
        return ChipPeak(f"TPU {name}", {"bf16": peak}, "the vendor's documentation, dense")
