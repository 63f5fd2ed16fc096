"""TPUs through PyTorch/XLA, and the CPU as XLA compiles for it."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Literal

from regauge.accelerators import Availability, Chip, Precision
from regauge.accelerators._xla import PLATFORM, XlaDevice, missing
from regauge.units import TERA

PEAKS = {"v4": 275 * TERA, "v5e": 197 * TERA, "v5p": 459 * TERA, "v6e": 918 * TERA}
"""Dense bf16 peaks of one chip (cloud.google.com/tpu/docs, system architecture of each version)."""
GOOGLE = "0x1ae0"
TPU_CHIPS = frozenset({"0x0027", "0x005e", "0x0062", "0x0063", "0x006f"})
"""PCI identifiers of TPU v2 or v3, v4, v5p, v5e and v6e."""


class Xla(XlaDevice):
    """A TPU chip, or the CPU."""

    variables: ClassVar[tuple[str, ...]] = (*XlaDevice.variables, "TPU_", "LIBTPU_")

    device: Literal["auto", "cpu", "tpu"] = "auto"
    """What XLA compiles for; `auto` is what PJRT_DEVICE says, else a TPU, else the CPU."""

    @classmethod
    def available(cls) -> Availability:
        if problem := missing():
            return Availability(0, problem)
        if os.environ.get(PLATFORM, "").upper() == "TPU" or _tpu_chips():
            return Availability(90, f"torch_xla {version('torch_xla')} finds TPU chips")
        return Availability(1, f"torch_xla {version('torch_xla')} compiles for the CPU")

    def platform(self) -> str:
        if self.device == "auto":
            return os.environ.get(PLATFORM) or ("TPU" if _tpu_chips() else "CPU")
        return self.device.upper()

    def precisions(self) -> tuple[Precision, ...]:
        return ("bf16", "fp32") if self.platform() == "TPU" else ("fp32", "bf16")

    def use(self, precision: Precision) -> None:
        """Let fp32 products be fp32: a TPU's default rounds their factors to bf16."""
        if self.platform() == "TPU":
            from torch_xla import backends

            backends.set_mat_mul_precision("highest" if precision == "fp32" else "default")

    def chip(self, precision: Precision) -> Chip:
        if self.platform() == "CPU":
            return Chip("XLA on the CPU")
        from torch_xla._internal import tpu

        name = f"v{tpu.version()}"
        peak = PEAKS.get(name)
        if peak is None or precision != "bf16":
            return Chip(f"TPU {name}")
        return Chip(f"TPU {name}", {"bf16": peak}, "the vendor's documentation, dense")


def _tpu_chips() -> int:
    """Return how many TPU chips this machine shows on its PCI bus; torch_xla is not imported."""
    found = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor, chip = ((device / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue
        found += vendor == GOOGLE and chip in TPU_CHIPS
    return found
