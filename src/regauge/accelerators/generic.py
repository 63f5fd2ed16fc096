"""Any other device that torch.accelerator offers."""

from __future__ import annotations

from typing import ClassVar

from regauge.accelerators import Availability, is_cpu_only_torch
from regauge.accelerators._native import NativeDevice


class Generic(NativeDevice):
    """The device that `torch.accelerator` names."""

    peer_names: ClassVar[tuple[str, ...]] = ("mps", "xpu")

    @classmethod
    def available(cls) -> Availability:
        if is_cpu_only_torch():
            return Availability(0, "this torch is a CPU-only build")
        import torch

        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            return Availability(0, "torch.accelerator offers no device")
        return Availability(10, f"torch.accelerator offers '{device.type}'")
