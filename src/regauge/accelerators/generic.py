"""Any other device that torch's own accelerator interface offers."""

from __future__ import annotations

from regauge.accelerators import Availability, for_cpus
from regauge.accelerators._native import NativeDevice


class Generic(NativeDevice):
    """The device that `torch.accelerator` names."""

    @classmethod
    def available(cls) -> Availability:
        if for_cpus():
            return Availability(0, "this torch was built for CPUs alone")
        import torch

        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            return Availability(0, "torch.accelerator offers no device")
        return Availability(10, f"torch.accelerator offers '{device.type}'")
